"""A generator that is another model than the one that is trained."""

import pytest

from hybridrl.config.schema import Config
from hybridrl.errors import TrainingError
from hybridrl.run.watchers.generator_check import check_generator


def figures(k3, **others):
    return {"mismatch/k3": k3, "mismatch/max_abs": 0.2, **others}


@pytest.mark.parametrize(
    ("dtype", "quantization", "fine", "wrong"),
    [
        ("float32", "none", 9e-5, 2e-4),
        ("bfloat16", "none", 0.04, 0.06),
        ("float32", "int8", 0.09, 0.11),
        ("bfloat16", "fp8", 0.09, 0.11),
    ],
)
def test_rounding_passes_and_another_model_does_not(dtype, quantization, fine, wrong):
    config = Config()
    config.model.dtype, config.rollout.quantization = dtype, quantization
    check_generator(config, figures(fine))
    with pytest.raises(TrainingError, match=r"off by 0\.2 .*rollout=transformers"):
        check_generator(config, figures(wrong))
    config.guard.most_mismatch = 1.0
    check_generator(config, figures(wrong))


def test_what_cannot_be_compared_passes():
    config = Config()
    config.model.dtype = "float32"
    check_generator(config, {})
    check_generator(config, figures(float("nan"), **{"policy/loss": float("nan")}))
    check_generator(config, figures(1.0, **{"staleness/max": 1.0}))
    config.guard.most_mismatch = 0.5
    with pytest.raises(TrainingError):
        check_generator(config, figures(1.0))


def test_weights_that_came_roughly_are_limited_by_what_is_set():
    config = Config()
    config.model.dtype, config.rollout.weight_sync = "float32", "int8"
    with pytest.raises(TrainingError, match="rollout=transformers"):  # they share their devices
        check_generator(config, figures(1.0))
    config.placement.strategy = "separation"
    check_generator(config, figures(1.0))
    config.guard.most_mismatch = 0.1
    check_generator(config, figures(0.09))
    with pytest.raises(TrainingError, match=r"most_mismatch=0\.1 .*weight_sync=int8"):
        check_generator(config, figures(0.2))


def test_log_probabilities_that_are_no_numbers_are_the_generators_fault():
    config = Config()
    config.model.dtype = "float32"
    with pytest.raises(TrainingError, match=r"mismatch/k3 is nan"):
        check_generator(config, figures(float("nan"), **{"policy/loss": 0.1}))

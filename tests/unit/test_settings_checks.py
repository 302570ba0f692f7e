"""Numbers that no job could work with are refused by the name of their setting."""

import resource

import pytest
from settings import configured

from hybridrl.checks.check_list import check
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config

HERE = ["executor=inline", "rollout=transformers"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkpoint.every=null", r"^checkpoint\.every=null: must have a value"),
        ("checkpoint.keep_last=[1]", r"^checkpoint\.keep_last=\[1\]: must be a whole number, 1"),
        ("recover.wait_s=soon", r"^recover\.wait_s=soon: must be a number, 0 or more\.$"),
        ("guard=1", r"^`guard=1`: `guard` is a group of settings; set guard\.on_nan"),
        ("checkpoint.evry=1", r"^There is no setting `checkpoint\.evry`.*`checkpoint\.every`"),
        ("resume='a\x00b'", "names no folder"),
        ("fork=memory://", "'memory://' names no folder"),
        ("fork=' '", "names no folder"),
    ],
)
def test_a_value_of_another_kind_is_named_beside_others_that_are_right(override, words):
    with pytest.raises(ConfigError, match=words):
        load_config(["model.tiny={hidden_size: 32, layers: 1, heads: 1}", override])


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize(
    "setting",
    [
        "actor.optimizer.learning_rate",
        "actor.optimizer.max_grad_norm",
        "algorithm.kl_coefficient",
        "algorithm.gamma",
        "reward.correct_at",
        "rollout.temperature",
        "controller.timeout_s",
    ],
)
def test_what_is_no_finite_number_is_refused(setting, value):
    config = configured([*HERE, f"{setting}={value}"])
    with pytest.raises(ConfigError, match=rf"{setting}=-?(nan|inf): must be a finite number"):
        check(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optimizer.betas=[0.9]", r"betas=\[0.9\]: must have 2 entries"),
        ("actor.optimizer.betas=[1.5,0.9]", "0 or more and less than 1"),
        ("actor.optimizer.betas=[.nan,0.9]", r"betas=\[nan, 0.9\]: each must be a finite"),
        ("actor.optimizer.weight_decay=-1", "weight_decay=-1.0: must be 0 or more"),
        ("algorithm.clip_low=-1", r"algorithm\.clip_low=-1.0: must be 0 or more"),
        ("num_devices=-1", "num_devices=-1: must be 1 or more, or null"),
        ("model.tiny.hidden_size=0", r"model\.tiny\.hidden_size=0: must be from 1 to 65,536"),
        (
            "recover.min_devices=2",
            r"recover.min_devices=2: the job has only 1 device\. Set it to 1",
        ),
        ("eval.samples=0", r"eval\.samples=0: must be 1 or more"),
        ("model.tiny.experts=-1", r"model\.tiny\.experts=-1: must be from 0"),
        ("actor.router_loss_weight=-1", r"router_loss_weight=-1\.0: must be 0 or more"),
        ("rollout.routing_replay=true", "with rollout=transformers: only vLLM says which"),
    ],
)
def test_what_is_out_of_range_is_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        check(configured([*HERE, override]))


def test_half_precision_with_small_range_is_for_generation_only():
    with pytest.raises(ConfigError, match=r"model\.dtype=float16: .* Set model\.dtype=bfloat16"):
        check(configured([*HERE, "model.dtype=float16"]))
    check(configured([*HERE, "model.dtype=float16", "algorithm=evaluate"]))


def test_options_of_the_users_functions_are_theirs():
    options = ["reward.function=length", "reward.options={length: {limit: .inf}}"]
    check(configured([*HERE, *options]))


def test_a_folder_of_checkpoints_has_a_name_and_is_not_the_runs_own(tmp_path):
    wanted = [*HERE, "checkpoint.every=1", f"run.directory={tmp_path}"]
    with pytest.raises(ConfigError, match=r"checkpoint\.folder=' ': must not be empty"):
        check(configured([*wanted, "checkpoint.folder=' '"]))
    with pytest.raises(ConfigError, match=r"checkpoint\.folder=.* is run\.directory itself"):
        check(configured([*wanted, f"checkpoint.folder={tmp_path}/"]))


@pytest.mark.parametrize(("most", "cure"), [(4096, "command."), (64, "command, as far as")])
def test_too_few_open_files_are_told_before_ray_starts(monkeypatch, most, cure):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, most))
    said = rf"may open 64 files here \(ulimit -n\), .* `ulimit -n 4096` before the {cure}"
    with pytest.raises(ConfigError, match=said):
        check(configured(HERE))
    check(configured([*HERE, "run.dry=true"]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.lora.rank=4", r"gains nothing with adapters \(actor\.lora\.rank=4\)"),
        ("actor.offload_between_calls=true", "keeps a copy of the weights on every device"),
    ],
)
def test_differences_of_weights_are_refused_where_they_gain_nothing(override, words):
    config = configured([*HERE, "actor.parallel.weights=int4_difference", override])
    with pytest.raises(ConfigError, match=words):
        check(config)

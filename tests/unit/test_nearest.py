"""What an unknown name is answered with."""

import pytest

from hybridrl.config.presets import algorithm_of
from hybridrl.errors import suggest_name


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("DAPO", ["grpo", "dapo"], "dapo"),
        ("Dr.GRPO", ["grpo", "dr_grpo"], "dr_grpo"),
        ("epochs", ["expert.choose", "trainer.steps"], None),
        ("qqq", ["grpo"], None),
    ],
)
def test_case_is_no_difference_and_a_poor_guess_is_none(name, known, meant):
    assert suggest_name(name, known) == (f" Did you mean `{meant}`?" if meant else "")


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "dr_grpo", "sft", "ppo"])
def test_a_run_is_known_by_its_algorithm(name):
    from hybridrl.composition.load import config_to_dict
    from hybridrl.job.config_resolution import load_config

    assert algorithm_of(config_to_dict(load_config([f"algorithm={name}"]))) == name


def test_a_trainer_of_ones_own_is_its_own_algorithm():
    assert algorithm_of({"trainer": {"name": "mine.py:Trainer"}}) == "mine.py:Trainer"

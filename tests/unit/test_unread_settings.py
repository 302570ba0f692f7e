"""A setting of the objective that a program does not read is named or refused."""

import pytest
from flips import another_value, default_at
from settings import configured

from hybridrl.checks.algorithm import check_algorithm
from hybridrl.config.names import leaves
from hybridrl.config.shown import idle
from hybridrl.errors import ConfigError

TEACHER = "models.teacher.path=some/model"
TEXTS = {"advantage": "leave_one_out", "policy_loss": "sapo", "loss_options": "{a: 1}"}
WITH_MINI_BATCHES = ("sft", "expert_iteration", "distillation", "offline_distillation")
OTHERS = ("dpo", "online_dpo", "reward_model", "evaluate")


@pytest.mark.parametrize("algorithm", [*WITH_MINI_BATCHES, *OTHERS])
def test_what_a_program_does_not_read_of_the_objective_is_told(algorithm):
    job = [f"algorithm={algorithm}", *([TEACHER] if "distillation" in algorithm else [])]
    check_algorithm(configured(job))
    read = set()
    for name, hint in leaves().items():
        group, _, leaf = name.partition(".")
        if group != "algorithm":
            continue
        value = TEXTS.get(leaf) or another_value(name, hint, default_at(name))
        config = configured([*job, f"{name}={value}"])
        try:
            check_algorithm(config)
            told = idle(config)
        except ConfigError as error:
            told = [str(error)]
        if not any(name in said for said in told):
            read.add(name)
    assert read == ({"algorithm.aggregation"} if algorithm in WITH_MINI_BATCHES else set())


def test_a_teacher_is_the_only_one_that_samples_are_held_to():
    job = ["algorithm=distillation", TEACHER, "distillation.loss=sampled"]
    terms = ["algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.1"]
    config = configured([*job, *terms])
    (said,) = idle(config)
    assert said.startswith("algorithm.kl_coefficient=0.1 does nothing in this job")

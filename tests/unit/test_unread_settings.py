"""A setting of the objective reaches it, or is named or refused where nothing reads it."""

import pytest
from flips import another_value, default_at
from settings import configured
from tiers import few_of

from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.composition.setting_names import list_settings
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.errors import ConfigError
from hybridrl.trainers.objectives import build_policy_objective

TEACHER = "models.teacher.path=some/model"
TEXTS = {"advantage": "leave_one_out", "policy_loss": "sapo", "loss_options": "{a: 1}"}
WITH_MINI_BATCHES = ("sft", "expert_iteration", "distillation", "offline_distillation")
OTHERS = ("dpo", "online_dpo", "reward_model", "evaluate")


@pytest.mark.parametrize("algorithm", few_of([*WITH_MINI_BATCHES, *OTHERS], ["sft", "online_dpo"]))
def test_what_a_program_does_not_read_of_the_objective_is_told(algorithm):
    job = [f"algorithm={algorithm}", *([TEACHER] if "distillation" in algorithm else [])]
    check_algorithm(configured(job))
    read = set()
    for name, hint in list_settings().items():
        group, _, leaf = name.partition(".")
        if group != "algorithm":
            continue
        value = TEXTS.get(leaf) or another_value(name, hint, default_at(name))
        config = configured([*job, f"{name}={value}"])
        try:
            check_algorithm(config)
            told = find_ineffective_settings(config)
        except ConfigError as error:
            told = [str(error)]
        if not any(name in said for said in told):
            read.add(name)
    assert read == ({"algorithm.aggregation"} if algorithm in WITH_MINI_BATCHES else set())


def test_a_teacher_is_the_only_one_that_samples_are_held_to():
    job = ["algorithm=distillation", TEACHER, "distillation.loss=sampled"]
    terms = ["algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.1"]
    config = configured([*job, *terms])
    (said,) = find_ineffective_settings(config)
    assert said.startswith("algorithm.kl_coefficient=0.1 does nothing in this job")


def test_every_setting_of_the_loss_reaches_it():
    settings = {
        **{"policy_loss": "ppo_clip", "clip_low": 0.11, "clip_high": 0.22, "dual_clip": 3.3},
        **{"kl_coefficient": 0.44, "kl_estimator": "k2", "entropy_coefficient": 0.55},
        **{"correction": "mask", "correction_level": "sequence"},
        **{"correction_low": 0.66, "correction_high": 7.7, "negative_kl_max": 0.88},
    }
    job = [f"algorithm.{name}={value}" for name, value in settings.items()]
    objective = build_policy_objective(configured(job))
    options = {name: settings.pop(name) for name in ("clip_low", "clip_high", "dual_clip")}
    assert objective.options == options and not objective.off_policy
    assert {name: getattr(objective, name) for name in settings} == settings
    in_reward = build_policy_objective(configured([*job, "algorithm.kl_in_reward=true"]))
    assert in_reward.kl_coefficient == 0 and in_reward.entropy_coefficient == 0.55
    options = "algorithm.loss_options={tau_positive: 2.0, tau_negative: 3.0}"
    sapo = build_policy_objective(configured(["algorithm=sapo", options]))
    assert sapo.policy_loss == "sapo"
    assert sapo.options == {"tau_positive": 2.0, "tau_negative": 3.0}
    older = ["placement=separation", "placement.staleness=1"]
    assert build_policy_objective(configured([*job, *older])).off_policy

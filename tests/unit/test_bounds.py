"""Every setting has its range beside it, and names agree with what the library knows."""

from dataclasses import is_dataclass, replace
from typing import get_args

import numpy as np
import pytest
from settings import configured

from hybridrl.algorithms.group_advantages import ADVANTAGE_SCALES
from hybridrl.algorithms.kl_divergence import KL_ESTIMATORS
from hybridrl.algorithms.policy_objective import CORRECTION_MODES
from hybridrl.algorithms.preference_losses import PREFERENCE_LOSSES
from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.checks.check_list import check
from hybridrl.config.constraints import NumberRange, OneOf
from hybridrl.config.schema import Config, TrainerConfig
from hybridrl.config.setting_types import (
    find_invalid_values,
    list_constraints,
    read_type_hints,
    reset_to_defaults,
    strip_annotations,
)
from hybridrl.engine.train_engine import MAX_SKIPPED_UPDATES
from hybridrl.errors import ConfigError
from hybridrl.system.dtypes import AUTO_DTYPE, DTYPES

ANY_NUMBER = {
    *("algorithm.entropy_coefficient", "reward.error_value", "reward.correct_at", "reward.weights"),
    *("environment.error_value", "eval.stop.target"),
    *("reward.model_weight", "reward.judge.weight", "cost.error_value", "cost.correct_at"),
    *("cost.weights", "cost.model_weight", "cost.judge.weight", "cost.limit"),
}
"""Settings for which zero and less make sense."""
HERE = ["executor=inline", "rollout=transformers"]


def all_hints(group=Config, prefix=""):
    for name, hint in read_type_hints(group).items():
        if is_dataclass(strip_annotations(hint)):
            yield from all_hints(strip_annotations(hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


HINTS = dict(all_hints())


def test_every_number_has_a_range():
    numbers = {name for name, hint in HINTS.items() if strip_annotations(hint) in (int, float)}
    lists = {
        name: get_args(strip_annotations(hint))
        for name, hint in HINTS.items()
        if get_args(strip_annotations(hint))
    }
    numbers |= {
        name for name, entry in lists.items() if strip_annotations(entry[0]) in (int, float)
    }
    of_lists = {
        name
        for name, entry in lists.items()
        if any(isinstance(b, NumberRange) for b in list_constraints(entry[0]))
    }
    ranged = {
        name
        for name in HINTS
        if any(isinstance(b, NumberRange) for b in list_constraints(HINTS[name]))
    }
    assert numbers - ranged - of_lists == ANY_NUMBER


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("algorithm.advantage_scale", ADVANTAGE_SCALES),
        ("algorithm.aggregation", AGGREGATION_MODES),
        ("algorithm.correction", ("auto", *CORRECTION_MODES)),
        ("algorithm.kl_estimator", KL_ESTIMATORS),
        ("model.dtype", (AUTO_DTYPE, *DTYPES)),
        ("model.save_dtype", tuple(DTYPES)),
        ("preference.loss", PREFERENCE_LOSSES),
    ],
)
def test_names_are_those_that_the_library_knows(setting, names):
    (choice,) = (bound for bound in list_constraints(HINTS[setting]) if isinstance(bound, OneOf))
    assert choice.names == tuple(names)


def test_the_guard_gives_up_no_later_than_the_engine():
    (limit,) = list_constraints(HINTS["guard.most_skipped"])
    assert limit.most == MAX_SKIPPED_UPDATES


def test_defaults_are_right_and_take_the_place_of_what_is_not():
    assert not dict(find_invalid_values(Config()))
    config = configured(["run.seed=-1", "rollout.top_p=2", "actor.optimizer.betas=[1,1]"])
    wrong = dict(find_invalid_values(config))
    assert wrong["actor.optimizer.betas"].startswith("actor.optimizer.betas=[1.0, 1.0]: each must")
    assert reset_to_defaults(config, wrong) == configured()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=4294967296", r"run\.seed=4294967296: must be from 0 to 4,294,967,295\.$"),
        ("trainer.steps=100000000000000000000000", "must fit into 64 bits"),
        ("eval.every=10000000000", "must be 1,000,000,000 or less"),
        ("rollout.temperature=1e-10", "from 0.01 to 100. Near 0 all samples"),
        ("rollout.stop=['']", r"stop=\[''\]: each must not be empty\.$"),
        ("algorithm.gamma=1.5", "from 0 to 1"),
        ("algorithm.dual_clip=0.5", r"more than 1, or null\.$"),
        ("executor=inlin", r"one of ray, inline\. Did you mean `inline`\?$"),
        ("metrics=[wandb,tensorbord]", r"or a list of them, or null|Did you mean `tensorboard`"),
        ("reward.judge.pattern=(", "does not compile"),
        ("reward.judge.pattern=score", "it has none"),
        ("models.reference.parallel={tp: 0}", r"models\.reference\.parallel\.tp=0: must be 1 or"),
        ("models.critic.optimizer={betas: [2, 0]}", r"models\.critic\.optimizer\.betas=\[2.0, 0.0"),
    ],
)
def test_what_is_out_of_range_is_refused_with_its_name(override, words):
    with pytest.raises(ConfigError, match=words):
        check(configured(["algorithm=ppo", "algorithm.kl_coefficient=0.1", *HERE, override]))


def test_a_wrong_value_has_no_followers():
    with pytest.raises(ConfigError) as raised:
        check(configured([*HERE, "algorithm.kl_in_reward=true", "algorithm.kl_coefficient=-1"]))
    assert raised.value.problems == ("algorithm.kl_coefficient=-1.0: must be 0 or more.",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trainer": TrainerConfig(steps="5")}, r"^trainer\.steps=5: must be a whole number, 1 or"),
        ({"trainer": TrainerConfig(steps=True)}, r"^trainer\.steps=True: must be a whole number"),
        ({"trainer": TrainerConfig(steps=None)}, r"^trainer\.steps=null: must be a whole number"),
        ({"actor": None}, r"^actor=null: must be a group of settings\.$"),
        ({"devices": 3}, r"^devices=3: must be one of auto, cpu, cuda"),
        ({"models": []}, r"^models=\[\]: must be a dictionary\.$"),
    ],
)
def test_a_program_s_values_of_another_type_are_refused_too(change, words):
    with pytest.raises(ConfigError, match=words):
        check(replace(configured(HERE), **change))


def test_a_program_may_give_numbers_of_numpy_and_tuples():
    config = configured(HERE)
    config.trainer.steps = np.int64(3)
    config.actor.optimizer.learning_rate = np.float32(0.5)
    config.actor.optimizer.betas = (0.9, 0.95)
    assert not dict(find_invalid_values(config))

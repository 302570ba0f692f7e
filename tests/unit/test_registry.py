"""Losses, advantages and driver programs in files of the user's."""

import itertools
import math

import pytest
import torch
from settings import configured

from hybridrl.algorithms import PolicyObjective, TokenSegments, ppo_clip
from hybridrl.algorithms.policy_objective import (
    SAMPLER_ANCHORED_LOSSES,
    find_advantage_estimator,
    find_policy_loss,
)
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.checks.check_list import check
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.errors import ConfigError
from hybridrl.job.device_pool import list_worker_paths
from hybridrl.run.step_metrics import compute_step_metrics
from hybridrl.trainers import PROGRAM_NAMES, grpo, load_trainer
from hybridrl.trainers.objectives import build_policy_objective
from hybridrl.trainers.trainer import Trainer
from hybridrl.trainers.update_columns import group_advantages

MINE = """
from hybridrl.algorithms import TokenLoss
from hybridrl.trainers.grpo import Trainer

NUMBER = 3

def plain(log_probs, advantages, segments, mask, clip_high: float = 9.0, slope: float = 1.0):
    assert segments.rows == 2 and mask.all()
    return TokenLoss(-advantages * log_probs * clip_high * slope, {})

def of_rows(log_probs):
    return TokenLoss(log_probs[:1], {})

def needy(log_probs, entropies):
    return TokenLoss(log_probs, {})

def halves(scores, lengths):
    return scores / 2 + lengths

def last_token(rewards, mask):
    return rewards * 2

def apart(reward_scores, reward_weights):
    return reward_scores @ reward_weights

def of_nothing(scores):
    return 0.0

class Mine(Trainer):
    pass

class Other:
    pass
"""
HERE = ["executor=inline", "rollout=transformers"]
LENGTHS = [3, 1]


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return file


def tokens():
    log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.1])
    columns = {"advantages": torch.tensor([1.0, -1.0, 2.0, 0.5]), "response_mask": torch.ones(4)}
    outputs = {"log_probs": log_probs, "entropy": torch.ones(4)}
    return outputs, columns, TokenSegments.from_cu_seqlens(torch.tensor([0, 3, 4]))


def samples():
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    return Batch.from_columns(
        {
            "scores": torch.tensor([1.0, 0.5]),
            "group_id": torch.tensor([7, 7]),
            "response_mask": RaggedColumn(torch.ones(sum(LENGTHS), dtype=torch.uint8), bounds),
        }
    )


def test_a_loss_is_given_what_it_names_and_its_options_by_settings(mine):
    settings = [f"algorithm.policy_loss={mine}:plain", "algorithm.clip_high=0.25"]
    config = configured([*HERE, *settings, "algorithm.loss_options={slope: 2}"])
    check(config)
    found = build_policy_objective(config)
    assert found.options == {"clip_high": 0.25, "slope": 2.0}
    outputs, columns, segments = tokens()
    expected = -columns["advantages"] * outputs["log_probs"] * 0.5
    torch.testing.assert_close(found(outputs, columns, segments).loss, expected)


def test_built_in_losses_get_the_settings_that_they_know():
    for loss, expected in {
        "ppo_clip": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None},
        "gspo": {"clip_low": 0.2, "clip_high": 0.3},
        "sapo": {},
        "reinforce": {},
    }.items():
        algorithm = [f"algorithm.policy_loss={loss}", "algorithm.clip_high=0.3"]
        assert build_policy_objective(configured([*HERE, *algorithm])).options == expected
    outputs, columns, segments = tokens()
    found = PolicyObjective("ppo_clip", {"clip_low": 0.1})(outputs, columns, segments)
    log_probs = outputs["log_probs"]
    torch.testing.assert_close(
        found.loss, ppo_clip(log_probs, log_probs, columns["advantages"], clip_low=0.1).loss
    )


def test_ratios_are_to_the_policy_that_sampled_where_it_is_an_older_one():
    outputs, columns, segments = tokens()
    log_probs, rollout = outputs["log_probs"], outputs["log_probs"] - 0.3
    columns |= {"log_probs": log_probs - 0.1, "rollout_log_probs": rollout}
    stale = PolicyObjective(off_policy=True)(outputs, columns, segments)
    expected = ppo_clip(log_probs, rollout, columns["advantages"])
    torch.testing.assert_close(stale.loss, expected.loss)
    for name, found in expected.metrics.items():
        torch.testing.assert_close(stale.metrics[name], found)
    # What is measured and what a correction weighs is the way from the sampler to the trainer.
    fresh = PolicyObjective()(outputs, columns, segments)
    torch.testing.assert_close(stale.metrics["mismatch_kl"], fresh.metrics["mismatch_kl"])
    corrected, usual = (
        PolicyObjective(off_policy=older, correction="truncate")(outputs, columns, segments).loss
        for older in (True, False)
    )
    torch.testing.assert_close(corrected, usual)
    torch.testing.assert_close(corrected, fresh.loss * math.exp(0.2))


@pytest.mark.parametrize("loss", SAMPLER_ANCHORED_LOSSES)
def test_some_losses_are_always_relative_to_the_policy_that_sampled(loss):
    outputs, columns, segments = tokens()
    rollout = outputs["log_probs"] - 0.3
    columns |= {"log_probs": outputs["log_probs"] - 0.1, "rollout_log_probs": rollout}
    fresh, stale = (
        PolicyObjective(loss, off_policy=older)(outputs, columns, segments)
        for older in (False, True)
    )
    torch.testing.assert_close(fresh.loss, stale.loss)
    torch.testing.assert_close(fresh.metrics["approx_kl"], torch.full((4,), -0.3))
    corrected = PolicyObjective(loss, correction="truncate")(outputs, columns, segments)
    torch.testing.assert_close(corrected.metrics["approx_kl"], torch.full((4,), -0.1))


def test_stale_samples_without_any_score_of_the_trainer_are_learned_from():
    outputs, columns, segments = tokens()
    columns["rollout_log_probs"] = outputs["log_probs"] - 0.3
    found = PolicyObjective(off_policy=True)(outputs, columns, segments)
    torch.testing.assert_close(found.metrics["ratio"], torch.full((4,), math.exp(0.3)))


def test_the_kl_in_the_loss_is_k3_with_the_gradient_of_k2():
    outputs, columns, segments = tokens()
    columns["ref_log_probs"] = outputs["log_probs"] + 3.0
    log_probs = outputs["log_probs"].clone().requires_grad_()
    found = PolicyObjective("reinforce", kl_coefficient=0.5)(
        {**outputs, "log_probs": log_probs}, {**columns, "advantages": torch.zeros(4)}, segments
    )
    found.loss.sum().backward()
    torch.testing.assert_close(found.metrics["kl"], torch.full((4,), 10.0))  # where it is clamped
    torch.testing.assert_close(log_probs.grad, torch.full((4,), 0.5 * -3.0))


def test_a_loss_of_another_shape_is_refused(mine):
    with pytest.raises(ConfigError, match=r"of_rows must return .*each of the 4 tokens"):
        PolicyObjective(f"{mine}:of_rows")(*tokens())


def test_advantages_of_rows_or_of_tokens(mine):
    def compare(name):
        config = AlgorithmConfig(advantage=f"{mine}:{name}")
        return group_advantages(samples(), config, 8)["advantages"].values.tolist()

    assert compare("halves") == [3.5, 3.5, 3.5, 1.25]
    assert compare("last_token") == [0.0, 0.0, 2.0, 1.0]
    apart = {"reward/a": torch.tensor([2.0, 3.0]), "reward/b": torch.tensor([10.0, 0.0])}
    batch = samples().with_columns(apart)
    config, weights = AlgorithmConfig(advantage=f"{mine}:apart"), {"reward/a": 1, "reward/b": 0.1}
    found = group_advantages(batch, config, 8, weights)["advantages"].values
    assert found.tolist() == [3.0, 3.0, 3.0, 3.0]
    with pytest.raises(ConfigError, match=r"of_nothing must return a number for each of the 2"):
        compare("of_nothing")


@pytest.mark.parametrize(
    ("load", "name", "words"),
    [
        (
            find_policy_loss,
            "needy",
            "`entropies`, which nobody gives it. Name any of log_probs, old_",
        ),
        (find_policy_loss, "NUMBER", "is a int; it must be a function"),
        (find_policy_loss, "plian", "Did you mean `plain`?"),
        (
            find_advantage_estimator,
            "plain",
            "`log_probs`, which nobody gives it. Name any of scores",
        ),
        (load_trainer, "Other", "is no subclass of hybridrl.trainers.trainer.Trainer"),
        (load_trainer, "halves", "is no subclass of hybridrl.trainers.trainer.Trainer"),
    ],
)
def test_what_cannot_be_used_is_refused(mine, load, name, words):
    with pytest.raises(ConfigError) as caught:
        load(f"{mine}:{name}")
    assert words in str(caught.value)


def test_a_name_that_is_none(mine):
    for load, known in ((find_policy_loss, "sapo"), (find_advantage_estimator, "pass_at_k")):
        with pytest.raises(ConfigError, match=rf"{known}.*, or one of yours, `path/to/file.py"):
            load("nothing")
    with pytest.raises(ConfigError, match=r"^trainer.name=gpro: must be one of .*`grpo`\?$"):
        load_trainer("gpro")


def test_a_driver_program_may_use_any_setting(mine):
    program = f"trainer.name={mine}:Mine"
    assert issubclass(load_trainer(program.partition("=")[2]), grpo.Trainer)
    check(configured([*HERE, program, f"algorithm.advantage={mine}:halves"]))
    with pytest.raises(
        ConfigError, match=r"`critic` is set, but trainer.name=.*Mine has no critic"
    ):
        check(configured([*HERE, program, "critic.value_clip=0.3"]))


def test_every_node_has_to_see_the_files_that_workers_read(mine, tmp_path):
    names = ("algorithm.policy_loss", "algorithm.advantage")
    overrides = [f"{name}={mine}:plain" for name in names]
    found = list_worker_paths(configured([*overrides, f"trainer.name={mine}:Mine"]), tmp_path)
    assert found == {"run.root": tmp_path, **dict.fromkeys(names, mine)}


def test_metrics_with_a_slash_are_written_as_they_are():
    found = compute_step_metrics(
        [], [{"policy/away": 1.0, "loss": 2.0, "other": 5.0}, {"loss": 4.0}], 1.0
    )
    assert found["policy/away"] == 1.0 and found["policy/loss"] == 3.0 and "other" not in found


def test_the_programs_are_those_that_can_be_run():
    assert {"grpo", "ppo", "dpo", "sft", "evaluate", "safe_rlhf"} <= set(PROGRAM_NAMES)
    assert all(issubclass(load_trainer(name), Trainer) for name in PROGRAM_NAMES)

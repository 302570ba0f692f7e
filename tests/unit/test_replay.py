"""Replay of earlier samples: how many, how old, and which."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from settings import configured

from hybridrl import load_config, main
from hybridrl.batch.batch import Batch
from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.errors import ConfigError
from hybridrl.trainers.grpo import ReplayBuffer, select_informative_rows
from hybridrl.trainers.objectives import find_off_policy_setting


class Ref(SimpleNamespace):
    """A batch that is looked at as a BatchRef is."""

    def collect(self, names, partial):
        return self.batch.select(filter(self.batch.__contains__, names))

    def take(self, rows):
        return Ref(batch=self.batch.take(rows))


def step(number, scores):
    groups = np.repeat(np.arange(4) + 4 * number, 2)
    return Ref(batch=Batch.from_columns({"group_id": groups, "scores": np.float32(scores)}))


def replay(share, age=4):
    settings = [f"algorithm.replay_share={share}", f"algorithm.replay_age={age}"]
    return ReplayBuffer(configured([*settings, "data.prompts_per_step=4"]))


def drawn(parts):
    return [int(group) for part in parts for group in part.batch["group_id"]]


def test_whole_groups_that_teach_something_are_drawn_up_to_a_share():
    buffer = replay(0.5)
    assert buffer.draw(0) == [] and buffer.figures == {"replay/groups": 0.0}
    buffer.keep(step(0, [0, 1, 1, 1, np.nan, 1, 1, 0]), 0)  # groups 0 and 3 differ
    assert drawn(buffer.draw(1)) == [0, 0, 3, 3]
    buffer.keep(step(1, [0, 1] * 4), 1)
    for _ in range(5):
        groups = drawn(buffer.draw(2))
        assert len(groups) == 8 and len(set(groups)) == 4, "as many as the step's own, none twice"
    assert buffer.figures["replay/age_max"] <= 2
    assert 1 <= buffer.figures["replay/age_mean"] <= 2


def test_of_rewards_that_are_learned_from_alone_one_must_differ():
    """Dropped samples, and rewards that a sample lacks, are compared with nothing."""
    batch = Batch.from_columns(
        {
            "group_id": np.repeat(np.arange(5), 2),
            "scores": np.float32([1, 1, 0, 2, 3, np.nan, 1, 1, 1, 1]),
            "reward/one": np.float32([1, 0, 0, 1, 3, 0, 1, 1, 1, np.nan]),
            "reward/two": np.float32([0, 1, 0, 1, 0, 0, 0, 0, 0, 0]),
        }
    )
    names = ["reward/one", "reward/two"]
    assert select_informative_rows(Ref(batch=batch), names)[0].tolist() == [0, 1, 2, 3]
    assert select_informative_rows(Ref(batch=batch), [])[0].tolist() == [2, 3]


def test_old_samples_go():
    buffer = replay(0.8, age=2)
    for number in range(5):
        buffer.keep(step(number, [0, 1] * 4), number)
    assert set(drawn(buffer.draw(5))) == set(range(12, 20))
    assert drawn(buffer.draw(9)) == []


def test_without_a_share_nothing_is_kept():
    buffer = replay(0.0)
    buffer.keep(step(0, [0, 1] * 4), 0)
    assert buffer.draw(1) == [] and not buffer._kept


def test_replayed_samples_are_of_an_older_policy():
    assert find_off_policy_setting(configured(["algorithm.replay_share=0.2"]))
    assert not find_off_policy_setting(configured([]))


def test_only_programs_that_replay_may_be_told_to():
    with pytest.raises(
        ConfigError, match=r"replay_share=0\.5: .* counts with `trainer\.name=grpo`"
    ):
        check_algorithm(configured(["algorithm=ppo", "algorithm.replay_share=0.5"]))
    with pytest.raises(ConfigError, match=r"replay_share=0\.5 learns from samples of another"):
        uncorrected = ["algorithm.replay_share=0.5", "algorithm.correction=none"]
        check_algorithm(configured(["algorithm=rloo", *uncorrected]))


def test_replayed_samples_are_corrected_to_the_policy_that_begins_the_step(tmp_path):
    """Also where a step makes several updates, for which log-probabilities are kept."""
    main.run(
        load_config(
            [
                *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
                *("model.tiny={hidden_size: 32, layers: 1, heads: 1}", "eval.every=0"),
                *("data.prompts_per_step=4", "rollout.samples_per_prompt=8", "eval.prompts=2"),
                *("rollout.max_tokens=4", "reward.function=length", "trainer.steps=3"),
                *("reward.options.length.limit=3", "actor.optimizer.learning_rate=0.01"),
                *("algorithm=rloo", "algorithm.replay_share=0.5", "actor.updates_per_step=2"),
                f"run.directory={tmp_path}",
            ]
        )
    )
    rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    first, *later = [row for row in rows if "policy/correction_weight" in row]
    assert first["policy/correction_weight"] == pytest.approx(1, abs=1e-6)
    assert first["replay/groups"] == 0
    for row in later:
        assert row["replay/groups"] > 0 and row["mismatch/k3"] > 1e-6
        assert abs(row["policy/correction_weight"] - 1) > 1e-5

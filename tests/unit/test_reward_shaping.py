"""Shorter right answers earn more; each source of prompts has its own scale."""

import json
import math
import random

import pytest
import torch
from settings import configured

from hybridrl.algorithms import relative_length_reward
from hybridrl.batch.batch import Batch
from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.errors import ConfigError
from hybridrl.trainers.score_shaper import (
    ScoreMoments,
    ScoreShaper,
    add_brevity_reward,
    normalize_scores_by_source,
)
from hybridrl.trainers.update_columns import SHAPED


def test_shorter_right_answers_earn_more_than_longer_ones():
    draw = random.Random(0)
    for _ in range(50):
        rows = draw.randrange(8)
        lengths = [draw.randrange(1, 6) for _ in range(rows)]
        right = [draw.random() < 0.5 for _ in range(rows)]
        groups = [draw.randrange(2) for _ in range(rows)]
        found = relative_length_reward(*map(torch.tensor, (lengths, right, groups))) if rows else []
        for row in range(rows):
            mine = [n for n, group in zip(lengths, groups, strict=True) if group == groups[row]]
            least, most = min(mine), max(mine)
            share = 0.5 - (lengths[row] - least) / (most - least) if most > least else 0.0
            expected = share if right[row] else min(0.0, share)
            assert float(found[row]) == pytest.approx(expected)


def batch(scores, lengths, **columns):
    masks = [torch.ones(n, dtype=torch.uint8) for n in lengths]
    groups = torch.zeros(len(scores), dtype=torch.int64)
    table = {"scores": torch.tensor(scores), "response_mask": masks, "group_id": groups}
    return Batch.from_columns(table | columns)


def test_dropped_samples_are_no_measure_for_others():
    found = add_brevity_reward(batch([1.0, 1.0, math.nan, 0.0], [2, 4, 100, 2]), 0.1, 1.0)[SHAPED]
    assert found.tolist() == pytest.approx([1.05, 0.95, math.nan, 0.0], nan_ok=True)


def test_what_is_right_is_said_without_steps():
    outcomes = {"outcomes": torch.tensor([0.0, 1.0])}
    found = add_brevity_reward(batch([2.0, 1.0], [2, 4], **outcomes), 1.0, 1.0)[SHAPED]
    assert found.tolist() == [2.0, 0.5]


def test_short_is_what_sampled_few_tokens_in_all_branches():
    masks = [[1, 1], [1, 0, 0, 0], [1, 1, 1]]  # of the second, three tokens are an environment's
    before = [[1, 0, 1], [], [0]]
    told = {"response_mask": [torch.tensor(mask, dtype=torch.uint8) for mask in masks]}
    rows = batch([1.0] * 3, [1] * 3, **told)
    assert add_brevity_reward(rows, 1.0, 1.0)[SHAPED].tolist() == [1.0, 1.5, 0.5]
    told["branch_response_mask"] = [torch.tensor(mask, dtype=torch.uint8) for mask in before]
    rows = batch([1.0] * 3, [1] * 3, **told)
    assert add_brevity_reward(rows, 1.0, 1.0)[SHAPED].tolist() == pytest.approx(
        [0.5, 1.5, 1 - 1 / 6]
    )


def test_moments_are_those_of_all_numbers_together():
    draw = random.Random(1)
    numbers = [draw.gauss(3, 2) for _ in range(40)]
    both = ScoreMoments.of(numbers[:13]).with_those(ScoreMoments.of([*numbers[13:], math.nan]))
    expected = torch.tensor(numbers, dtype=torch.float64)
    assert both.number == 40 and both.mean == pytest.approx(float(expected.mean()))
    assert both.std == pytest.approx(float(expected.std()))
    assert (
        ScoreMoments().with_those(ScoreMoments()) == ScoreMoments() == ScoreMoments.of([math.nan])
    )
    assert ScoreMoments.of([2.0]).std == ScoreMoments.of([2.0, 2.0]).std == 1.0


def test_each_source_has_its_own_scale():
    known = {"a": ScoreMoments.of([10.0, 20.0, 30.0])}
    rows = batch([40.0, 1.0, 3.0, math.nan], [1] * 4, source=["a", "b", "b", "a"])
    found = normalize_scores_by_source(rows, "source", known)[SHAPED].tolist()
    a, b = torch.tensor([10.0, 20, 30, 40]), torch.tensor([1.0, 3])
    expected = [(40 - a.mean()) / a.std(), *((b - b.mean()) / b.std()), math.nan]
    assert found == pytest.approx([float(x) for x in expected], nan_ok=True)


class Here(Batch):
    """A batch that is where the driver is."""

    def apply(self, function, columns, **_):
        return Here(function(self.select(columns)).table)

    def collect(self, columns):
        return self.select(columns)

    def select(self, *columns):
        return Here(super().select(*columns if isinstance(columns[0], list) else [columns]).table)

    def __or__(self, other):
        return Here((Batch(self.table) | other).table)


def test_a_run_that_goes_on_knows_what_was_scored_before():
    config = configured(["reward.normalise_by=source", "data=jsonl", "data.path=some.jsonl"])
    steps = [
        Here(batch([s, s + 1.0], [1, 1], source=["a", "b"]).table) for s in (1.0, 5.0, 2.0, 9.0)
    ]
    whole = ScoreShaper(config)
    expected = [whole.shaped(step)[SHAPED].tolist() for step in steps]
    first, second = ScoreShaper(config), ScoreShaper(config)
    for step in steps[:2]:
        first.shaped(step)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [second.shaped(step)[SHAPED].tolist() for step in steps[2:]] == expected[2:]
    assert second.shaped(steps[0]).columns == [SHAPED], "others would replace those of branches"
    assert expected[0] == [0.0, 0.0] and expected[3][0] > 1


def test_what_is_not_shaped_is_refused():
    for overrides, words in [
        (["algorithm=remax", "reward.shorter=0.1"], "does not read it"),
        (["algorithm=expert_iteration", "reward.normalise_by=source"], "does not read it"),
        (["algorithm=ppo", "reward.shorter=1", "rollout.samples_per_prompt=1"], "Draw 2 or more"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_algorithm(configured(overrides))
    check_algorithm(configured(["reward.shorter=0.1"]))

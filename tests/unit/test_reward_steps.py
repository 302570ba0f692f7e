"""Steps of a response: their ends in text and tokens, what functions may say of them, and the
advantages that follow."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch

from hybridrl.algorithms import TokenSegments, part_advantages
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards.response_steps import count_tokens_up_to, step_ends
from hybridrl.rewards.returned_scores import parse_row_score
from hybridrl.trainers.update_columns import critic_advantages, group_advantages


def test_steps_end_behind_their_separators():
    assert step_ends("a\n\nbc\n\n\n\nd") == [3, 9, 10]
    assert step_ends("\n\na\n\n") == [5]
    assert step_ends("a. b. c", ". ") == [3, 6, 7]
    assert step_ends("one") == [3]
    assert step_ends("") == step_ends("\n\n \n\n") == []


def test_ends_in_text_are_found_in_tokens():
    draw = random.Random(0)
    for _ in range(50):
        pieces = [
            "".join(draw.choices("ab", k=draw.randrange(4))) for _ in range(draw.randrange(9))
        ]
        text, ids = "".join(pieces), list(range(len(pieces)))
        ends = sorted(draw.sample(range(1, len(text) + 1), min(3, len(text))))
        found = count_tokens_up_to(ends, ids, lambda ids, p=pieces: "".join(p[i] for i in ids))
        for end, tokens in zip(ends, found, strict=True):
            assert len("".join(pieces[:tokens])) >= end > len("".join(pieces[: tokens - 1]))


def test_a_score_has_its_steps_in_it():
    answer = parse_row_score({"score": 1, "steps": [(4, -0.5), (2, 0.25)], "depth": 2}, "abcd")
    assert answer == (0.75, 1.0, {"depth": 2.0}, [(2, 0.25), (4, -0.5)])
    assert parse_row_score({"steps": [[1, 0.5], [2, 0.25]]}, "ab")[:2] == (0.75, None)
    assert parse_row_score({"steps": []}, "")[:2] == (0, None)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(5, 1.0)], "a step that ends at character 5, and the response has 4"),
        ([(0, 1.0)], "ends at character 0"),
        ([0.5, 0.5], "0.5 .* among its 'steps', expected pairs"),
        ([(1, math.nan)], "among its 'steps'"),
        ([(1.5, 1.0)], "among its 'steps'"),
        (3, "whose 'steps' are 3"),
    ],
)
def test_what_are_no_steps_is_said(steps, words):
    assert isinstance(said := parse_row_score({"score": 1.0, "steps": steps}, "abcd"), str)
    assert re.search(words, said)


MASK = [[1, 1, 1], [1, 0, 1, 1], [1], [1, 1]]
ENDS = [[1, 3], [2, 4], [], [1]]
REWARDS = [[1.0, 0.0], [0.0, 2.0], [], [0.5]]
SCORES = torch.tensor([1.5, 2.0, 0.0, math.nan])


def batch(**columns):
    rows = {
        "response_mask": [torch.tensor(row) for row in MASK],
        "step_ends": [torch.tensor(row, dtype=torch.int64) for row in ENDS],
        "step_rewards": [torch.tensor(row, dtype=torch.float32) for row in REWARDS],
        "scores": SCORES,
        "group_id": torch.zeros(4, dtype=torch.int64),
    }
    return Batch.from_columns(rows | columns)


def test_steps_of_a_prompts_samples_are_compared_and_dropped_ones_are_not():
    config = replace(AlgorithmConfig(), step_credit="sum", advantage_scale="none")
    found = group_advantages(batch(), config, 8)
    # What steps do not account for, 0.5 of the first sample, lies on its last token.
    rewards = torch.tensor([1.0, 0, 0.5, 0, 0, 0, 2, 0, 0, 0])
    numbers = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 1])
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, 3, 7, 8, 10]), mask)
    expected = part_advantages(rewards, numbers, torch.zeros(4).long(), segments, "none")
    torch.testing.assert_close(found.ragged("advantages").values, expected)
    first = 1.5 - (1.5 + 2.0 + 0.0) / 3
    assert expected[0] == pytest.approx(first) and expected[1] == pytest.approx((0.5 - 2.0) / 2)
    assert not found.ragged("response_mask").values[-2:].any()


def test_the_returns_of_a_critic_see_each_step():
    config = replace(AlgorithmConfig(), step_credit="sum")
    values = {"values": [torch.zeros(len(row)) for row in MASK]}
    returns = critic_advantages(batch(**values), config, 8, 0.0).ragged("returns").values
    assert returns.tolist() == pytest.approx([1.5, 0.5, 0.5, 2, 0, 2, 2, 0, 0, 0])
    worst = replace(config, step_credit="min")
    returns = critic_advantages(batch(**values), worst, 8, 0.0).ragged("returns").values
    assert returns[0] == pytest.approx(0.5, abs=1e-3), "the worst step, and what is no step's"


def test_rewards_of_steps_are_refused_where_nothing_reads_them():
    from settings import configured

    from hybridrl.checks.settings.algorithm_checks import check_algorithm

    for overrides, words in [
        (["algorithm=remax", "algorithm.step_credit=sum"], "one score a sample"),
        (["algorithm=rloo", "algorithm.step_credit=sum"], "compares whole samples"),
        (["reward.model=some/model", "reward.model_steps=x"], "Set algorithm.step_credit=sum"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_algorithm(configured(overrides))
    check_algorithm(configured(["algorithm=ppo", "algorithm.step_credit=min"]))

"""Episodes of several rows: however an episode's tokens are cut into rows, each has the credit and
the weight that it has in one row; and from columns of branches to rows."""

import itertools

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.policy_objective import ADVANTAGE_ESTIMATORS, has_parameter
from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.batch.row_balancing import split_by_runs
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.errors import DataError
from hybridrl.rollout.episode_batch import EpisodeSample, build_episode_batch
from hybridrl.rollout.rollout_engine import EngineOutput, ragged
from hybridrl.rollout.transcript import TokenTranscript
from hybridrl.trainers.episode_branches import select_branch_tokens
from hybridrl.trainers.update_columns import (
    constrained_advantages,
    critic_advantages,
    greedy_advantages,
    group_advantages,
    loss_weights,
)

OF_TOKENS = ("log_probs", "ref_log_probs", "values", "cost_values")
SEVERAL = hypothesis.settings(max_examples=25, deadline=None)


@st.composite
def episodes(draw):
    """Episodes of one row each, and the same of several: both with the same tokens in the same
    order."""
    count = draw(st.integers(1, 6))
    turns = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)) for _ in range(count)]
    lengths = [sum(sizes) for sizes in turns]
    total = sum(lengths)
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(total, generator=generator) < 0.8).to(torch.uint8)
    turn = torch.tensor([n for sizes in turns for n, size in enumerate(sizes) for _ in range(size)])
    scores = torch.randint(0, 3, (count,), generator=generator).float()
    if draw(st.booleans()):
        scores[0] = float("nan")
    rewarded = [len(sizes) if draw(st.booleans()) else 0 for sizes in turns]
    by_sample = {
        "scores": scores,
        "costs": torch.randn(count, generator=generator),
        "greedy_scores": torch.randn(count, generator=generator),
        "group_id": torch.arange(count) // 3,
        "turn_rewards": ragged(
            [torch.randn(n, generator=generator).tolist() for n in rewarded], np.float32
        ),
    }
    by_token = {"response_mask": mask, "turn": turn.to(torch.int32)}
    by_token |= {name: torch.randn(total, generator=generator) for name in OF_TOKENS}
    cuts = [draw(st.sets(st.integers(1, max(1, n - 1)), max_size=3)) - {n} for n in lengths]
    rows = [(e, stop - start) for e, n in enumerate(lengths) for start, stop in
            itertools.pairwise([0, *sorted(cuts[e]), n])]  # fmt: skip
    whole = Batch.from_columns(
        {**by_sample, **{name: packed(x, lengths) for name, x in by_token.items()}}
    )
    sizes, numbers = [size for _, size in rows], [episode for episode, _ in rows]
    cut = (
        whole.select(by_sample)
        .take(np.array(numbers))
        .with_columns(
            {
                **{name: packed(x, sizes) for name, x in by_token.items()},
                "episode": torch.tensor(numbers),
            }
        )
    )
    return whole, cut


def packed(values, lengths):
    return RaggedColumn(values, torch.tensor([0, *itertools.accumulate(lengths)]))


def assert_same(function, batches, *names):
    whole, cut = batches
    one, several = function(whole), function(cut)
    for name in names:
        expected, found = one.ragged(name).values, several.ragged(name).values
        assert torch.allclose(expected.float(), found.float(), atol=1e-5), name
        assert several.ragged(name).lengths.equal(cut.ragged("response_mask").lengths)


CREDITS = ("episode", "turn")
WITHOUT_NEGATIVE_SCORES = {"maximum_likelihood"}


@pytest.mark.more
@pytest.mark.parametrize(
    "advantage",
    [n for n, f in ADVANTAGE_ESTIMATORS.items() if not has_parameter(f, "reward_scores")],
)
@pytest.mark.parametrize("credit", CREDITS)
@SEVERAL
@given(batches=episodes(), with_kl=st.booleans())
def test_how_an_episode_is_cut_into_rows_does_not_change_its_advantages(
    advantage, credit, batches, with_kl
):
    negative = advantage not in WITHOUT_NEGATIVE_SCORES
    with_kl = with_kl and negative
    config = AlgorithmConfig(
        advantage=advantage,
        turn_credit=credit,
        gamma=0.9,
        kl_in_reward=with_kl,
        kl_coefficient=0.1 * with_kl,
        overlong_buffer=3 * negative,
    )
    if not negative:
        batches = [with_positive_rewards(batch) for batch in batches]
    names = ("advantages", "response_mask")
    assert_same(lambda batch: group_advantages(batch, config, 5), batches, *names)


def with_positive_rewards(batch):
    """Lift scores above the rewards of turns, so that what follows a turn is never negative."""
    rewards = batch.ragged("turn_rewards")
    return batch.with_columns(
        {
            "turn_rewards": rewards._replace(values=rewards.values.abs()),
            "scores": batch["scores"] + 50,
        }
    )


@pytest.mark.parametrize("credit", CREDITS)
@SEVERAL
@given(batches=episodes())
def test_nor_those_of_values_and_of_greedy_answers(credit, batches):
    config = AlgorithmConfig(kl_in_reward=True, kl_coefficient=0.1, gamma=0.9, turn_credit=credit)
    shared = ("advantages", "response_mask")
    assert_same(lambda b: critic_advantages(b, config, 5, 0.1), batches, *shared, "returns")
    assert_same(
        lambda b: constrained_advantages(b, config, 5, 0.1, 0.5),
        batches,
        *(*shared, "returns", "cost_returns"),
    )
    if credit == "episode":
        assert_same(lambda b: greedy_advantages(b, config, 5, 0.1), batches, *shared)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@SEVERAL
@given(batches=episodes())
def test_nor_the_weights_of_its_tokens(mode, batches):
    assert_same(lambda batch: loss_weights(batch, mode, 7), batches, "loss_weights")


def test_the_credit_of_turns_by_hand():
    """Two samples of a prompt: turns rewarded 1 and 0, then 0.5 for the whole; and only 2."""
    batch = Batch.from_columns(
        {
            "scores": torch.tensor([1.5, 2.0]),
            "group_id": torch.tensor([4, 4]),
            "turn_rewards": ragged([[1.0, 0.0], []], np.float32),
            "response_mask": packed(torch.tensor([1, 1, 0, 1, 1], dtype=torch.uint8), [4, 1]),
            "turn": packed(torch.tensor([0, 0, 0, 1, 0], dtype=torch.int32), [4, 1]),
        }
    )
    config = AlgorithmConfig(turn_credit="turn", gamma=0.5, advantage_scale="none")
    found = group_advantages(batch, config, 10)["advantages"].values.tolist()
    # The first turns are worth 1 + 0.5 * 0.5 and 2; the second turn has nothing to compare with.
    assert found == pytest.approx([-0.375, -0.375, 0.0, 0.0, 0.375])
    found = group_advantages(batch, AlgorithmConfig(advantage_scale="none"), 10)
    assert found["advantages"].values.tolist() == pytest.approx([-0.25, -0.25, 0, -0.25, 0.25])


def test_a_score_below_the_rewards_of_turns_is_told_as_that():
    batch = Batch.from_columns(
        {
            "scores": torch.tensor([0.0, 1.0]),
            "group_id": torch.tensor([4, 4]),
            "turn_rewards": ragged([[1.0], [1.0]], np.float32),
            "response_mask": packed(torch.ones(4, dtype=torch.uint8), [2, 2]),
            "turn": packed(torch.tensor([0, 1, 0, 1], dtype=torch.int32), [2, 2]),
        }
    )
    config = AlgorithmConfig(turn_credit="turn", advantage="maximum_likelihood")
    said = "from a turn on.*scored -1.*no less than the rewards of its turns"
    with pytest.raises(DataError, match=said):
        group_advantages(batch, config, 10)


def test_the_kl_of_a_turn_is_taken_off_its_reward():
    """Two samples of a prompt, of two turns each, of which the first has left its reference."""
    lengths, kl = [4, 2], torch.tensor([0.2, 0.3, 7.0, 0.4, 0.0, 0.0])
    batch = Batch.from_columns(
        {
            "scores": torch.tensor([1.0, 1.0]),
            "group_id": torch.tensor([4, 4]),
            "turn_rewards": ragged([[1.0, 0.0], [1.0, 0.0]], np.float32),
            "response_mask": packed(torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.uint8), lengths),
            "turn": packed(torch.tensor([0, 0, 0, 1, 0, 1], dtype=torch.int32), lengths),
            "log_probs": packed(kl - 3.0, lengths),
            "ref_log_probs": packed(torch.full((6,), -3.0), lengths),
        }
    )
    own = {"kl_in_reward": True, "kl_coefficient": 0.5, "turn_credit": "turn"}
    config = AlgorithmConfig(**own, gamma=0.5, advantage_scale="none")
    found = group_advantages(batch, config, 10)["advantages"].values.tolist()
    # The first's turns are worth 1 - 0.5 * 0.5 + 0.5 * -0.2 and -0.5 * 0.4; the other's, 1 and 0.
    assert found == pytest.approx([-0.175, -0.175, 0.0, -0.1, 0.175, 0.1])


def test_rewards_of_turns_lie_at_their_ends_for_a_critic():
    batch = Batch.from_columns(
        {
            "scores": torch.tensor([1.5]),
            "turn_rewards": ragged([[1.0, 0.0]], np.float32),
            "response_mask": packed(torch.tensor([1, 1, 0, 1], dtype=torch.uint8), [4]),
            "turn": packed(torch.tensor([0, 0, 0, 1], dtype=torch.int32), [4]),
            "values": packed(torch.zeros(4), [4]),
        }
    )
    config = AlgorithmConfig(turn_credit="turn", gamma=0.5, lam=0.0)
    returns = critic_advantages(batch, config, 10, 0.0)["returns"].values.tolist()
    assert returns == [0.0, 1.0, 0.0, 0.5]


def transcript(prompt, *turns, first=0):
    """Alternately sampled and given tokens."""
    found = TokenTranscript(prompt)
    for number, tokens in enumerate(turns):
        if number % 2:
            found.add_given(tokens)
        else:
            output = EngineOutput(0, found.token_ids, tokens, [-0.5] * len(tokens), "stop")
            found.add_sampled(output, first)
            first += 1
    return found


def test_each_row_gets_the_tokens_of_its_branch():
    samples = [
        EpisodeSample([transcript([1, 2], [3], [4], [5, 6])], [0.0, 1.0], 1.0, "stop", {"n": 2.0}),
        EpisodeSample([], [], float("nan"), "crash"),
        EpisodeSample(
            [transcript([1], [7, 8]), transcript([9] * 3, [1], first=1), transcript([2], [3], [4])],
            *([], 0.5, "stop"),
        ),
    ]
    batch = build_episode_batch(samples, [[1, 2], [5], [1]])
    assert batch["branches"].tolist() == [1, 0, 3] and batch["turns"].tolist() == [2, 0, 3]
    assert [p.tolist() for p in batch["prompt_ids"].rows()] == [[1, 2], [5], [2]]
    assert batch["environment/n"][0] == 2.0 and batch["environment/n"][1:].isnan().all()
    rows = batch.take([0, 2, 2, 2]).with_columns({"branch": torch.tensor([0, 0, 1, 2])})
    own = select_branch_tokens(rows)

    def column(name):
        return [row.tolist() for row in own[name].rows()]

    assert column("prompt_ids") == [[1, 2], [1], [9] * 3, [2]]
    assert column("response_ids") == [[3, 4, 5, 6], [7, 8], [1], [3, 4]]
    assert column("response_mask") == [[1, 0, 1, 1], [1, 1], [1], [1, 0]]
    assert column("turn") == [[0, 0, 1, 1], [0, 0], [1], [0, 0]]
    assert len(select_branch_tokens(rows.slice(0, 0))) == 0
    assert len(build_episode_batch([], [])) == 0


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(1, 5))
def test_no_block_has_a_part_of_an_episode(sizes, parts):
    episodes = [number for number, size in enumerate(sizes) for _ in range(size)]
    found = split_by_runs(episodes, parts)
    assert [row for block in found for row in block] == list(range(len(episodes)))
    having = [{episodes[row] for row in block} for block in found]
    assert sum(map(len, having)) == len(sizes)
    assert max(map(len, having)) - min(map(len, having)) <= 1

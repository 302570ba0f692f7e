"""Between the calls of a step: ragged columns in, ragged columns out, and dropped samples."""

import itertools
import math

import pytest
import torch

from hybridrl import algorithms
from hybridrl.algorithms import token_weights
from hybridrl.algorithms.registry import ADVANTAGES, takes
from hybridrl.algorithms.weights import MODES
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.core.batch import Batch, Ragged
from hybridrl.trainers.shaping import (
    as_baseline,
    constrained_advantages,
    critic_advantages,
    greedy_advantages,
    group_advantages,
    loss_weights,
)

# Two prompts, their samples mixed; lengths, scores and costs of each.
LENGTHS = [3, 5, 1, 4, 2, 5]
GROUPS = [7, 7, 2, 7, 2, 2]
SCORES = [1.0, 0.0, 0.5, 0.25, 1.0, 0.0]
SCALED = [name for name, function in ADVANTAGES.items() if takes(function, "scale")]
COSTS = [0.0, 1.0, 0.0, 0.5, 0.0, 1.0]
LONGEST = 5
TOKEN_COLUMNS = ("log_probs", "ref_log_probs", "values", "cost_values")


def make_batch(holes=True, **replaced):
    """A step's samples; with holes a turn of two tokens in the mask of row 1."""
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    tokens = sum(LENGTHS)
    mask = torch.ones(tokens, dtype=torch.uint8)
    if holes:
        mask[4:6] = 0
    columns = {
        "scores": torch.tensor(SCORES),
        "costs": torch.tensor(COSTS),
        "greedy_scores": torch.tensor([0.5, 0.5, 0.25, 0.5, 0.25, 0.25]),
        "group_id": torch.tensor(GROUPS),
        "response_mask": Ragged(mask, cu_seqlens),
    }
    for name in TOKEN_COLUMNS:
        columns[name] = Ragged(torch.randn(tokens, generator=generator), cu_seqlens)
    return Batch.from_columns(columns | replaced)


def dense(batch, name):
    return batch.padded(name)[0]


def mask_of(batch):
    return dense(batch, "response_mask").bool()


def without(values, *rows):
    """These numbers, with NaN at `rows`: samples whose reward function failed."""
    return torch.tensor([math.nan if row in rows else x for row, x in enumerate(values)])


def settings(**changed):
    return AlgorithmConfig(**changed)


def compare(batch, longest=LONGEST, **changed):
    return group_advantages(batch, settings(**changed), longest)


def assert_column(found, name, expected):
    """The ragged column equals the dense tensor, and lies as the batch's own columns do."""
    assert found.lengths(name).tolist() == LENGTHS
    torch.testing.assert_close(dense(found, name), expected)


OPTIONS = [
    *(({"advantage": name}) for name in ADVANTAGES),
    *(
        {"advantage": name, "advantage_scale": scale}
        for name in SCALED
        for scale in ("none", "batch")
    ),
    {"advantage": "reinforce_plus_plus", "gamma": 0.9},
]


def expected_advantages(batch, advantage, advantage_scale="std", gamma=1.0):
    """The algorithm's own function on dense tensors, on each token of its row."""
    scores, groups, mask = batch["scores"], batch["group_id"], mask_of(batch)
    function = getattr(algorithms, advantage)
    if advantage == "reinforce_plus_plus":
        rewards = torch.zeros(mask.shape)
        for row, place in enumerate(LENGTHS):
            rewards[row, place - 1] = scores[row]
        return function(rewards, mask, gamma)[0]
    if advantage == "reinforce_plus_plus_baseline":
        return function(scores, groups, mask)
    if advantage == "optimal_reward_baseline":
        return function(scores, mask.sum(1), groups)
    return function(scores, groups, *([advantage_scale] if advantage in SCALED else []))


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_group_advantages_are_those_of_the_estimator(options):
    batch = make_batch()
    found = compare(batch, **options)
    assert found.columns == ["advantages", "response_mask"]
    expected = expected_advantages(batch, **options)
    expected = expected if expected.ndim == 2 else algorithms.spread(expected, mask_of(batch))
    advantages = torch.where(mask_of(batch), dense(found, "advantages"), 0.0)
    torch.testing.assert_close(advantages, expected)
    assert float(advantages.abs().max()) > 0.1
    assert_column(found, "response_mask", dense(batch, "response_mask"))


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_a_dropped_sample_has_an_empty_mask_and_changes_nothing_for_the_others(options):
    dropped, kept = [1, 4], [0, 2, 3, 5]
    batch = make_batch(scores=without(SCORES, *dropped))
    found = compare(batch, **options)
    assert mask_of(found).sum(1).tolist() == [3, 0, 1, 4, 0, 5]
    alone = compare(batch.take(kept), **options)
    for name in found.columns:
        columns = found.take(kept).ragged(name), alone.ragged(name)
        torch.testing.assert_close(*(column.values for column in columns))
    assert torch.isfinite(found["advantages"].values).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_where_all_are_dropped_nothing_is_learned(name):
    found = compare(make_batch(scores=without(SCORES, *range(6))), advantage=name)
    assert not mask_of(found).any() and (found["advantages"].values == 0).all()
    assert (loss_weights(found, "token-mean")["loss_weights"].values == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_answers_near_the_limit_are_punished(name):
    batch, overlong = make_batch(), {"overlong_buffer": 2, "overlong_factor": 0.8}
    # Of a limit of 5 with a buffer of 2: lengths 3, 5, 1, 4, 2, 5 lose nothing up to 3.
    punished = torch.tensor(SCORES) - torch.tensor([0.0, 0.8, 0.0, 0.4, 0.0, 0.8])
    expected = compare(batch.with_columns({"scores": punished}), advantage=name)
    found = compare(batch, advantage=name, **overlong)
    torch.testing.assert_close(found["advantages"].values, expected["advantages"].values)
    far = compare(batch, longest=50, advantage=name, **overlong)
    torch.testing.assert_close(
        far["advantages"].values, compare(batch, advantage=name)["advantages"].values
    )


def test_the_kl_is_taken_off_the_rewards_of_reinforce_plus_plus():
    batch = make_batch()
    found = compare(
        batch,
        advantage="reinforce_plus_plus",
        kl_in_reward=True,
        kl_coefficient=0.3,
        kl_estimator="k1",
    )
    rewards = -0.3 * (dense(batch, "log_probs") - dense(batch, "ref_log_probs"))
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] += SCORES[row]
    expected, _ = algorithms.reinforce_plus_plus(rewards, mask_of(batch))
    assert_column(found, "advantages", expected)


def token_rewards(batch, scores, coefficient, estimator):
    columns = dense(batch, "log_probs"), dense(batch, "ref_log_probs")
    return algorithms.shape_rewards(scores, mask_of(batch), *columns, coefficient, estimator)


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_critic_advantages_are_whitened_gae(kl_in_reward):
    batch = make_batch()
    config = settings(gamma=0.9, lam=0.8, kl_in_reward=kl_in_reward, kl_estimator="k1")
    found = critic_advantages(batch, config, LONGEST, 0.4)
    mask, values = mask_of(batch), dense(batch, "values")
    rewards = token_rewards(batch, batch["scores"], 0.4 if kl_in_reward else 0.0, "k1")
    advantages, returns = algorithms.gae(rewards, values, mask, 0.9, 0.8)
    assert_column(found, "advantages", algorithms.whiten(advantages, mask))
    assert_column(found, "returns", returns)
    assert_column(found, "response_mask", dense(batch, "response_mask"))


def test_without_kl_in_the_reward_no_reference_is_needed():
    names = ("scores", "response_mask", "values")
    batch = make_batch().select(names)
    found = critic_advantages(batch, settings(kl_coefficient=0.1), LONGEST, 0.1)
    expected = critic_advantages(make_batch(), settings(), LONGEST, 0.0)
    for name in expected.columns:
        assert_column(found, name, dense(expected, name))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_greedy_advantages_are_remax(gamma):
    batch = make_batch(holes=False)
    found = greedy_advantages(batch, settings(gamma=gamma), LONGEST, 0.0)
    assert found.columns == ["advantages", "response_mask"]
    gain = torch.tensor(SCORES) - batch["greedy_scores"]  # nothing is discounted
    assert_column(found, "advantages", algorithms.spread(gain, mask_of(batch)))


def test_greedy_advantages_with_kl_and_failures():
    greedy = without([0.5, 0.5, 0.25, 0.5, 0.25, 0.25], 0)
    batch = make_batch(greedy_scores=greedy, scores=without(SCORES, 3))
    config = settings(kl_in_reward=True, kl_estimator="k1")
    found = greedy_advantages(batch, config, LONGEST, 0.2)
    mask = mask_of(batch)
    mask[3] = False
    differences = dense(batch, "log_probs") - dense(batch, "ref_log_probs")
    expected = torch.zeros(mask.shape)
    for row, place in mask.nonzero().tolist():
        later = mask[row].clone()
        later[:place] = False
        # A greedy answer without a score counts as 0.
        expected[row, place] = SCORES[row] - float(greedy[row].nan_to_num())
        expected[row, place] -= 0.2 * float(differences[row][later].sum())
    assert_column(found, "advantages", expected)
    assert_column(found, "response_mask", mask.to(torch.uint8))
    renamed = as_baseline(batch)
    assert renamed.columns == ["greedy_scores"]
    assert torch.equal(renamed["greedy_scores"].isnan(), batch["scores"].isnan())


def one_of_each(**columns):
    """Two samples of two tokens."""
    ragged = {
        name: [torch.tensor(row) for row in columns.pop(name)]
        for name in list(columns)
        if isinstance(columns[name][0], list)
    }
    return Batch.from_columns(
        {
            **{name: torch.tensor(values) for name, values in columns.items()},
            **ragged,
            "response_mask": [torch.ones(2, dtype=torch.uint8)] * 2,
        }
    )


def test_constrained_advantages_by_hand():
    batch = one_of_each(
        scores=[1.0, 0.0],
        costs=[0.0, 2.0],
        values=[[0.5, 0.25], [0.0, 0.5]],
        cost_values=[[1.0, 0.0], [1.0, 1.5]],
        log_probs=[[-1.0, -2.0], [-1.0, -1.0]],
        ref_log_probs=[[-1.5, -2.0], [-1.0, -2.0]],
    )
    config = settings(kl_in_reward=True, kl_estimator="k1")
    found = constrained_advantages(batch, config, 2, 0.4, 3.0)
    # Half of 0.4 times a KL of (0.5, 0), (0, 1) is taken off the rewards and put onto the costs.
    returns = torch.tensor([1.0 - 0.1, 1.0, -0.2, -0.2])
    cost_returns = torch.tensor([0.0 + 0.1, 0.0, 2.2, 2.2])
    good = returns - torch.tensor([0.5, 0.25, 0.0, 0.5])
    bad = cost_returns - torch.tensor([1.0, 0.0, 1.0, 1.5])
    good = (good - good.mean()) / good.std()
    bad = (bad - bad.mean()) / bad.std() + bad.mean()
    torch.testing.assert_close(found["returns"].values, returns)
    torch.testing.assert_close(found["cost_returns"].values, cost_returns)
    torch.testing.assert_close(found["advantages"].values, (good - 3.0 * bad) / 4.0)
    assert found["response_mask"].values.tolist() == [1, 1, 1, 1]


def test_constrained_advantages_leave_out_what_has_no_reward_or_no_cost():
    batch = make_batch(scores=without(SCORES, 0), costs=without(COSTS, 5))
    config = settings(gamma=0.9, lam=0.5)
    found = constrained_advantages(batch, config, LONGEST, 0.0, 0.5)
    assert mask_of(found).sum(1).tolist() == [0, 3, 1, 4, 2, 0]
    kept = [1, 2, 3, 4]
    alone = constrained_advantages(batch.take(kept), config, LONGEST, 0.0, 0.5)
    for name in found.columns:
        mine = found.take(kept).ragged(name).values
        torch.testing.assert_close(mine, alone.ragged(name).values)
        assert torch.isfinite(found[name].values).all()


@pytest.mark.parametrize("mode", MODES)
def test_loss_weights_are_those_of_the_mini_batch(mode):
    batch = make_batch()
    found = loss_weights(batch, mode, 7)
    assert found.columns == ["loss_weights"]
    assert_column(found, "loss_weights", token_weights(mask_of(batch), mode, length_norm=7))
    empty = loss_weights(batch.slice(0, 0), mode, 7)
    assert len(empty) == 0 and len(empty["loss_weights"].values) == 0

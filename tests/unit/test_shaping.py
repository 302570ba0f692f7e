"""Between the calls of a step: ragged columns in, ragged columns out, and dropped samples."""

import itertools
import math
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl import algorithms
from hybridrl.algorithms import token_weights
from hybridrl.algorithms.policy_objective import ADVANTAGE_ESTIMATORS, has_parameter
from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import AlgorithmConfig
from hybridrl.errors import ConfigError
from hybridrl.trainers.update_columns import (
    constrained_advantages,
    critic_advantages,
    greedy_advantages,
    greedy_baseline,
    group_advantages,
    is_group_local,
    loss_weights,
)

# Two prompts, their samples mixed; lengths, scores and costs of each.
LENGTHS = [3, 5, 1, 4, 2, 5]
GROUPS = [7, 7, 2, 7, 2, 2]
SCORES = [1.0, 0.0, 0.5, 0.25, 1.0, 0.0]
NOT_NEGATIVE = "maximum_likelihood"
"""The advantage that refuses scores below 0."""
OF_SCORES = [
    name for name, f in ADVANTAGE_ESTIMATORS.items() if not has_parameter(f, "reward_scores")
]
"""Those that know one score of a sample, and not each reward's own."""
SCALED = [
    name for name, function in ADVANTAGE_ESTIMATORS.items() if has_parameter(function, "scale")
]
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
        "response_mask": RaggedColumn(mask, cu_seqlens),
    }
    for name in TOKEN_COLUMNS:
        columns[name] = RaggedColumn(torch.randn(tokens, generator=generator), cu_seqlens)
    return Batch.from_columns(columns | replaced)


def dense(batch, name):
    return batch.padded(name)[0]


def scored_for(name, batch):
    """The batch, with scores that this advantage can be computed of."""
    return batch.with_columns({"scores": batch["scores"].abs()}) if name == NOT_NEGATIVE else batch


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


@pytest.mark.parametrize("name", [name for name in OF_SCORES if name != NOT_NEGATIVE])
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


def test_without_kl_in_the_reward_no_reference_is_needed():
    names = ("scores", "response_mask", "values")
    batch = make_batch().select(names)
    found = critic_advantages(batch, settings(kl_coefficient=0.1), LONGEST, 0.1)
    expected = critic_advantages(make_batch(), settings(), LONGEST, 0.0)
    for name in expected.columns:
        assert_column(found, name, dense(expected, name))


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
    good, bad = good / good.std(), bad / bad.std()
    torch.testing.assert_close(found["returns"].values, returns)
    torch.testing.assert_close(found["cost_returns"].values, cost_returns)
    torch.testing.assert_close(found["advantages"].values, (good - 3.0 * bad) / 4.0)
    assert found["response_mask"].values.tolist() == [1, 1, 1, 1]


# Ragged batches of any kind, against the same formulas on padded tensors.

FEW = hypothesis.settings(max_examples=25)


@st.composite
def ragged_batches(draw):
    """Samples with holes, without tokens, dropped, or none at all; of groups in any order."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    rows, tokens = len(lengths), sum(lengths)
    bits = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    lost = draw(st.lists(st.booleans(), min_size=3 * rows, max_size=3 * rows))
    groups = draw(st.lists(st.sampled_from([-3, 0, 10**12]), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    dropped = torch.tensor(lost, dtype=torch.bool).view(3, rows)
    scores = torch.randn(3, rows, generator=generator).round(decimals=1)
    columns = {
        "scores": scores[0].masked_fill(dropped[0], math.nan),
        "costs": scores[1].masked_fill(dropped[1], math.nan),
        "greedy_scores": scores[2].masked_fill(dropped[2], math.nan),
        "group_id": torch.tensor(groups, dtype=torch.int64),
        "response_mask": RaggedColumn(torch.tensor(bits, dtype=torch.uint8), cu_seqlens),
    }
    for name in TOKEN_COLUMNS:
        columns[name] = RaggedColumn(torch.randn(tokens, generator=generator), cu_seqlens)
    return Batch.from_columns(columns)


def padded(batch, *dropping):
    """The mask without rows of which one of these columns is NaN, and the token columns, padded."""
    mask = mask_of(batch)
    for name in dropping:
        mask = mask & ~batch[name].isnan().unsqueeze(1)
    return mask, {name: dense(batch, name) for name in TOKEN_COLUMNS}


def assert_packed(batch, found, **expected):
    """Each column has the batch's lengths, float32 or bytes, and the values of the padded tensor;
    0 off the mask."""
    assert sorted(found.columns) == sorted(expected) and len(found) == len(batch)
    real = batch.padded("response_mask")[1]
    for name, values in expected.items():
        column = found.ragged(name)
        assert column.cu_seqlens.tolist() == batch.ragged("response_mask").cu_seqlens.tolist()
        assert column.values.dtype == (torch.uint8 if name == "response_mask" else torch.float32)
        torch.testing.assert_close(column.values, values[real].to(column.values.dtype))


@FEW
@given(ragged_batches(), st.sampled_from([{}, {"overlong_buffer": 3}]), st.booleans())
def test_packed_ppo_equals_padded(batch, options, with_kl):
    config = settings(gamma=0.9, lam=0.8, kl_in_reward=with_kl, **options)
    found = critic_advantages(batch, config, 6, 0.3)
    mask, columns = padded(batch, "scores")
    scores = batch["scores"].nan_to_num()
    if options:
        lengths = batch.ragged("response_mask").lengths
        scores = scores + algorithms.overlong_penalty(lengths, 6, 3)
    both = columns["log_probs"], columns["ref_log_probs"]
    rewards = algorithms.shape_rewards(scores, mask, *both, 0.3 * with_kl, "k1")
    advantages, returns = algorithms.gae(rewards, columns["values"], mask, 0.9, 0.8)
    whitened = algorithms.whiten(advantages, mask)
    assert_packed(batch, found, advantages=whitened, returns=returns, response_mask=mask)


@FEW
@given(ragged_batches())
def test_packed_safe_rlhf_equals_padded(batch):
    config = settings(gamma=0.9, lam=0.8, kl_in_reward=True)
    found = constrained_advantages(batch, config, 6, 0.4, 3.0)
    mask, columns = padded(batch, "scores", "costs")
    both = columns["log_probs"], columns["ref_log_probs"]

    def credit(scores, values, coefficient):
        scores = batch[scores].nan_to_num()
        rewards = algorithms.shape_rewards(scores, mask, *both, coefficient, "k1")
        return algorithms.gae(rewards, columns[values], mask, 0.9, 0.8)

    good, returns = credit("scores", "values", 0.2)
    bad, cost_returns = credit("costs", "cost_values", -0.2)
    good, bad = (algorithms.divide_by_std(x, mask) for x in (good, bad))
    assert_packed(
        batch,
        found,
        advantages=(good - 3.0 * bad) / 4.0,
        returns=returns,
        cost_returns=cost_returns,
        response_mask=mask,
    )


@FEW
@given(ragged_batches(), st.sampled_from([1.0, 0.5]))
def test_packed_remax_equals_padded(batch, gamma):
    """Nothing is discounted."""
    config = settings(kl_in_reward=True, gamma=gamma)
    found = greedy_advantages(batch, config, 6, 0.3)
    mask, columns = padded(batch, "scores", "greedy_scores")
    both = columns["log_probs"], columns["ref_log_probs"]
    rewards = algorithms.shape_rewards(batch["scores"].nan_to_num(), mask, *both, 0.3, "k1")
    advantages, _ = algorithms.remax(rewards, batch["greedy_scores"].nan_to_num(), mask)
    assert_packed(batch, found, advantages=advantages, response_mask=mask)


@pytest.mark.parametrize("name", OF_SCORES)
@FEW
@given(
    batch=ragged_batches(),
    with_kl=st.booleans(),
    scale=st.sampled_from(["std", "none", "batch"]),
    gamma=st.sampled_from([1.0, 0.9]),
)
def test_packed_group_advantages_equal_padded(name, batch, with_kl, scale, gamma):
    """And a sample without a score has an empty mask, and changes nothing for the others."""
    batch, with_kl = scored_for(name, batch), with_kl and name != NOT_NEGATIVE
    options = {"advantage_scale": scale, "gamma": gamma, "kl_in_reward": with_kl}
    found = group_advantages(batch, settings(advantage=name, kl_coefficient=0.3, **options), 6)
    mask, columns = padded(batch, "scores")
    kept = ~batch["scores"].isnan()
    scores, groups, held = batch["scores"][kept], batch["group_id"][kept], mask[kept]
    both = columns["log_probs"][kept], columns["ref_log_probs"][kept]
    coefficient = 0.3 if with_kl else 0.0
    function = getattr(algorithms, name)
    if name == "reinforce_plus_plus":
        rewards = algorithms.shape_rewards(scores, held, *both, coefficient, "k1")
        estimated = function(rewards, held, gamma)[0]
    else:
        penalty = algorithms.estimate_kl(*both, "k1", mask=held).sum(1)
        scores = scores - coefficient * penalty
        of_lengths = name == "optimal_reward_baseline"
        arguments = (scores, held.sum(1), groups) if of_lengths else (scores, groups)
        of_tokens = name == "reinforce_plus_plus_baseline"
        further = [held] if of_tokens else [scale] if name in SCALED else []
        estimated = function(*arguments, *further)
        estimated = estimated if of_tokens else algorithms.broadcast_to_tokens(estimated, held)
    advantages = torch.zeros(mask.shape)
    advantages[kept] = estimated
    assert_packed(batch, found, advantages=advantages, response_mask=mask)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@FEW
@given(batch=ragged_batches())
def test_packed_loss_weights_equal_padded(mode, batch):
    for longest in (6, None):
        norm = longest or max([1, *batch.lengths("response_mask").tolist()])
        weights = token_weights(mask_of(batch), mode, length_norm=norm)
        assert_packed(batch, loss_weights(batch, mode, longest), loss_weights=weights)


@pytest.mark.parametrize("name", OF_SCORES)
@FEW
@given(batch=ragged_batches(), scale=st.sampled_from(["std", "none"]))
def test_what_splits_by_group_gives_the_same_in_parts(name, batch, scale):
    batch = scored_for(name, batch)
    config = settings(advantage=name, advantage_scale=scale)
    if not is_group_local(config):
        return
    whole = group_advantages(batch, config, 6)
    for group in batch["group_id"].unique():
        rows = (batch["group_id"] == group).nonzero().flatten().numpy()
        part = group_advantages(batch.take(rows), config, 6)
        for column in whole.columns:
            expected = whole.take(rows).ragged(column).values
            torch.testing.assert_close(part.ragged(column).values, expected)


def test_which_advantages_split_by_group():
    split = {name for name in ADVANTAGE_ESTIMATORS if is_group_local(settings(advantage=name))}
    assert split == set(ADVANTAGE_ESTIMATORS) - {
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gdpo",
    }
    assert not is_group_local(settings(advantage_scale="batch"))
    assert not is_group_local(settings(advantage="mine.py:against_all"))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def test_what_is_computed_is_as_large_as_there_are_tokens():
    lengths = [2_000, *[1] * 100]
    tokens = sum(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    columns = {
        "scores": torch.rand(101),
        "costs": torch.rand(101),
        "greedy_scores": torch.rand(101),
        "group_id": torch.arange(101) // 4,
        "response_mask": RaggedColumn(torch.ones(tokens, dtype=torch.uint8), cu_seqlens),
    }
    for name in TOKEN_COLUMNS:
        columns[name] = RaggedColumn(torch.rand(tokens), cu_seqlens)
    batch, config = Batch.from_columns(columns), settings(kl_in_reward=True, kl_coefficient=0.1)
    with Largest() as largest:
        for name in OF_SCORES:
            with_kl = name != NOT_NEGATIVE
            group_advantages(batch, replace(config, advantage=name, kl_in_reward=with_kl), 2_000)
        critic_advantages(batch, config, 2_000, 0.1)
        constrained_advantages(batch, config, 2_000, 0.1, 1.0)
        greedy_advantages(batch, config, 2_000, 0.1)
        for mode in AGGREGATION_MODES:
            loss_weights(batch, mode, 2_000)
    assert tokens <= largest.elements <= tokens + len(lengths)


def test_the_kl_in_the_reward_is_k1_unless_another_is_asked_for():
    batch = make_batch()
    found, k1, k3 = (
        critic_advantages(batch, settings(kl_in_reward=True, kl_estimator=name), LONGEST, 0.3)
        for name in (None, "k1", "k3")
    )
    assert torch.equal(found["returns"].values, k1["returns"].values)
    assert not torch.allclose(found["returns"].values, k3["returns"].values)


@FEW
@given(
    ragged_batches(),
    st.sampled_from([1e-3, 0.1, 7.0, 1e4]),
    st.floats(0.1, 5.0),
)
def test_the_unit_of_the_cost_changes_nothing(batch, unit, multiplier):
    config = settings(lam=0.9)
    values = batch.ragged("cost_values")
    other = batch.with_columns(
        {
            "costs": batch["costs"] * unit,
            "cost_values": values._replace(values=values.values * unit),
        }
    )
    mine, theirs = (
        constrained_advantages(b, config, 6, 0.0, multiplier)["advantages"].values
        for b in (batch, other)
    )
    torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-4)


def test_the_sign_of_the_mean_cost_is_kept():
    batch = make_batch(holes=False)
    none = batch.ragged("values")._replace(values=torch.zeros(sum(LENGTHS)))
    same = {"scores": torch.zeros(6), "values": none, "cost_values": none}
    for costs in (torch.tensor(COSTS), -torch.tensor(COSTS)):
        found = constrained_advantages(
            batch.with_columns({**same, "costs": costs}), settings(), LONGEST, 0.0, 1.0
        )["advantages"].values
        assert float(found.mean()) * float(costs.mean()) < 0


def test_the_greedy_answer_is_punished_as_samples_are():
    batch, overlong = make_batch(holes=False), settings(overlong_buffer=2, overlong_factor=0.8)
    batch |= greedy_baseline(batch, overlong, LONGEST)  # as if the samples were the greedy answers
    found = greedy_advantages(batch, overlong, LONGEST, 0.0)
    assert (found["advantages"].values == 0).all()
    empty = greedy_baseline(batch.slice(0, 0), overlong, LONGEST)
    assert len(empty) == 0 and empty["greedy_scores"].dtype == torch.float32
    failed = greedy_baseline(make_batch(scores=without(SCORES, 3)), overlong, LONGEST)
    assert failed.columns == ["greedy_scores"]
    assert failed["greedy_scores"].isnan().tolist() == [row == 3 for row in range(6)]


MINE = """
import torch

def padded(scores, mask, rewards):
    assert mask.shape == rewards.shape == (len(scores), 5) and mask.dtype == torch.bool
    return rewards.flip(-1).cumsum(-1).flip(-1)

def packed(scores, mask, rewards, segments):
    assert mask.shape == rewards.shape == segments.mask.shape == (mask.numel(),)
    return segments.spread(scores)

def of_rows(scores, segments):
    return scores
"""


def test_a_function_of_yours_is_given_padded_tokens_or_packed_ones(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    batch = make_batch(scores=without(SCORES, 0))
    mask = mask_of(batch) & ~batch["scores"].isnan().unsqueeze(1)
    expected = algorithms.broadcast_to_tokens(batch["scores"].nan_to_num(), mask)
    for name in ("padded", "packed"):
        found = compare(batch, advantage=f"{file}:{name}")
        assert_packed(batch, found, advantages=expected, response_mask=mask)
    with pytest.raises(ConfigError, match=r"of_rows must return .*for each token, \[17\]"):
        compare(batch, advantage=f"{file}:of_rows")

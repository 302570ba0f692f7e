"""Every advantage estimator and the reward shaping against a slow, obvious loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import (
    TokenSegments,
    broadcast_to_tokens,
    estimate_kl,
    find_informative_rows,
    gae,
    gdpo,
    group_relative,
    leave_one_out,
    maximum_likelihood,
    optimal_reward_baseline,
    overlong_penalty,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    shape_rewards,
    whiten,
)
from hybridrl.errors import ConfigError, DataError

POISON = (math.nan, math.inf, -math.inf, 1e30)


def poisoned(x, mask, value):
    return torch.where(mask, x, value)


@st.composite
def answers(draw):
    """A generator of random numbers, a mask with holes and empty rows, and a poison value."""
    rows, time = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    bits = draw(st.lists(st.booleans(), min_size=rows * time, max_size=rows * time))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    return generator, torch.tensor(bits).view(rows, time), draw(st.sampled_from(POISON))


@st.composite
def grouped_scores(draw):
    """Scores with ties and groups in any order, of any size, one included."""
    pairs = draw(
        st.lists(
            st.tuples(
                st.sampled_from([-7, 0, 3, 10**12]),
                st.sampled_from([0.0, 1.0, 0.1, -2.5, 5.3]),
                st.integers(0, 5),
            ),
            min_size=1,
            max_size=12,
        )
    )
    groups, scores, lengths = zip(*pairs, strict=True)
    return (
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(groups),
        torch.tensor(lengths),
    )


def by_group(function, scores, groups, *more):
    """Applies function(list of rows) -> list to each group of two or more; 0 for the others."""
    result = torch.zeros(len(scores), dtype=torch.float64)
    for group in groups.unique():
        rows = (groups == group).nonzero().flatten()
        if len(rows) > 1:
            result[rows] = function(scores[rows], *(x[rows] for x in more))
    return result


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# Along the tokens of an answer.


def returns_to_go(rewards, gamma):
    total, result = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        result.append(total)
    return result[::-1]


@given(answers(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_a_loop_over_the_tokens_kept(case, gamma, lam):
    generator, mask, poison = case
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    expected_advantages = torch.zeros_like(rewards)
    expected_returns = torch.zeros_like(rewards)
    for row in range(len(mask)):
        next_value = next_advantage = 0.0
        for time in reversed(mask[row].nonzero().flatten().tolist()):
            delta = rewards[row, time] + gamma * next_value - values[row, time]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, time]
            expected_advantages[row, time] = next_advantage
            expected_returns[row, time] = next_advantage + next_value
    advantages, returns = gae(
        poisoned(rewards, mask, poison), poisoned(values, mask, poison), mask, gamma=gamma, lam=lam
    )
    close(advantages, expected_advantages)
    close(returns, expected_returns)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@given(answers(), st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_and_remax(case, gamma):
    generator, mask, poison = case
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    greedy = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    expected, undiscounted, less_greedy = (torch.zeros_like(rewards) for _ in range(3))
    for row, held in enumerate(mask):
        kept = rewards[row, held].tolist()
        expected[row, held] = rewards.new_tensor(returns_to_go(kept, gamma))
        undiscounted[row, held] = rewards.new_tensor(returns_to_go(kept, 1.0))
        less_greedy[row, held] = undiscounted[row, held] - greedy[row]
    given_rewards = poisoned(rewards, mask, poison)
    advantages, returns = reinforce_plus_plus(given_rewards, mask, gamma=gamma)
    close(returns, expected)
    close(advantages, whiten(expected, mask))
    greedy = torch.where(mask.any(-1), greedy, poison)
    advantages, returns = remax(given_rewards, greedy, mask)
    close(returns, undiscounted)
    close(advantages, less_greedy)


@given(answers())
def test_spread_puts_a_row_value_on_its_tokens(case):
    generator, mask, poison = case
    values = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    result = broadcast_to_tokens(torch.where(mask.any(-1), values, poison), mask)
    assert torch.equal(result, torch.where(mask, values[:, None], 0.0))


# Over the answers to one prompt.


@given(grouped_scores())
def test_group_relative_in_three_scales(case):
    scores, groups, _ = case
    std = by_group(lambda s: (s - s.mean()) / (s.std() + 1e-6), scores, groups)
    none = by_group(lambda s: s - s.mean(), scores, groups)
    whole = scores.std() if len(scores) > 1 else 0.0
    torch.testing.assert_close(group_relative(scores, groups), std, rtol=1e-6, atol=1e-8)
    close(group_relative(scores, groups, scale="none"), none)
    close(group_relative(scores, groups, scale="batch", eps=0.5), none / (whole + 0.5))


@given(grouped_scores())
def test_leave_one_out(case):
    scores, groups, _ = case

    def slow(s):
        return torch.stack([s[i] - torch.cat([s[:i], s[i + 1 :]]).mean() for i in range(len(s))])

    close(leave_one_out(scores, groups), by_group(slow, scores, groups))


@given(grouped_scores())
def test_optimal_reward_baseline(case):
    scores, groups, lengths = case

    def slow(s, length):
        total = length.sum()
        return s - (length * s).sum() / total if total else torch.zeros_like(s)

    close(optimal_reward_baseline(scores, lengths, groups), by_group(slow, scores, groups, lengths))


@given(grouped_scores())
def test_pass_at_k(case):
    scores, groups, _ = case

    def gap(s):
        first, second = s.sort(descending=True).values[:2]
        result = torch.zeros_like(s)
        result[s.argmax()] = first - second
        return result

    close(pass_at_k(scores, groups, scale="none"), by_group(gap, scores, groups))
    scaled = by_group(lambda s: gap(s) / (s.std() + 1e-6), scores, groups)
    torch.testing.assert_close(pass_at_k(scores, groups), scaled, rtol=1e-6, atol=1e-8)


@given(grouped_scores(), st.integers(0, 10_000))
def test_reinforce_plus_plus_baseline(case, seed):
    scores, groups, _ = case
    mask = torch.rand(len(scores), 4, generator=torch.Generator().manual_seed(seed)) < 0.6
    centred = by_group(lambda s: s - s.mean(), scores, groups)
    expected = whiten(broadcast_to_tokens(centred, mask), mask)
    for row in range(len(scores)):
        if (groups == groups[row]).sum() == 1:
            expected[row] = 0.0
    torch.testing.assert_close(
        reinforce_plus_plus_baseline(scores, groups, mask), expected, rtol=1e-6, atol=1e-8
    )


@given(grouped_scores())
def test_keep_informative(case):
    scores, groups, _ = case
    expected = [len(set(scores[groups == group].tolist())) > 1 for group in groups]
    assert find_informative_rows(scores, groups).tolist() == expected
    assert find_informative_rows(scores > 0, groups).dtype == torch.bool


@given(st.sampled_from([0.1, 5.3, -1e4, 1 / 3]), st.integers(1, 17))
def test_a_group_of_equal_scores_is_exactly_zero_in_float32(score, size):
    scores, groups = torch.full((size,), score), torch.zeros(size, dtype=torch.long)
    lengths = torch.arange(1, size + 1)
    for result in (
        *(group_relative(scores, groups, scale=scale) for scale in ("std", "none", "batch")),
        leave_one_out(scores, groups),
        optimal_reward_baseline(scores, lengths, groups),
        pass_at_k(scores, groups),
    ):
        assert (result == 0).all()


def test_group_estimators_take_integers_and_give_float32():
    scores, groups = torch.tensor([1, 0, 1, 0]), torch.tensor([5, 5, 2, 2])
    for estimator in (group_relative, leave_one_out, pass_at_k):
        assert estimator(scores, groups).dtype == torch.float32
    assert optimal_reward_baseline(scores.half(), scores, groups).dtype == torch.float32
    assert leave_one_out(scores, groups).tolist() == [1.0, -1.0, 1.0, -1.0]


def test_no_gradient_flows_and_no_argument_changes():
    scores = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    groups = torch.tensor([1, 1, 0])
    x = torch.randn(3, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    before = x.detach().clone()
    results = [
        *gae(x, x, mask),
        *reinforce_plus_plus(x, mask),
        *remax(x, scores, mask),
        group_relative(scores, groups),
        group_relative(scores, groups, scale="none"),
        leave_one_out(scores, groups),
        pass_at_k(scores, groups),
        optimal_reward_baseline(scores, scores, groups),
        reinforce_plus_plus_baseline(scores, groups, mask),
        broadcast_to_tokens(scores, mask),
        shape_rewards(scores, mask, x, x, 0.1, "k3"),
    ]
    assert not any(result.requires_grad for result in results)
    assert torch.equal(x, before)


def test_an_unknown_scale_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean `batch`"):
        group_relative(torch.ones(2), torch.zeros(2), scale="bacth")


# Shaping.


@given(answers(), st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_shape_rewards_puts_the_score_on_the_last_token_kept(case, estimator):
    generator, mask, poison = case
    log_probs = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    ref_log_probs = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    scores = torch.randn(len(mask), generator=generator, dtype=torch.float64)
    expected = torch.where(mask, -0.3 * estimate_kl(log_probs, ref_log_probs, estimator), 0.0)
    for row, held in enumerate(mask):
        if held.any():
            expected[row, held.nonzero().max()] += scores[row]
    result = shape_rewards(
        torch.where(mask.any(-1), scores, poison),
        mask,
        poisoned(log_probs, mask, poison),
        poisoned(ref_log_probs, mask, poison),
        coefficient=0.3,
        estimator=estimator,
    )
    close(result, expected)
    assert (result[~mask] == 0).all()


def test_overlong_penalty():
    lengths = torch.tensor([0, 80, 85, 90, 100, 101, 500])
    penalty = overlong_penalty(lengths, limit=100, buffer=20, factor=2.0)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0, -2.0, -2.0]))
    hard = overlong_penalty(lengths, limit=100, buffer=0, factor=0.5)
    assert hard.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, -0.5, -0.5]
    with pytest.raises(ConfigError, match="buffer"):
        overlong_penalty(lengths, limit=10, buffer=11, factor=1.0)


# Padded and packed tokens; no rows, one row, rows without tokens.


def in_both_layouts(function, per_row, per_token, mask, lengths):
    """The results of function(rows, tokens, mask, segments) on padded tokens, packed, and on packed
    ones."""
    real = torch.arange(mask.shape[1]) < lengths.unsqueeze(1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    segments = TokenSegments.from_cu_seqlens(cu_seqlens)
    padded = function(per_row, per_token, mask & real, None)
    packed = function(per_row, [x[real] for x in per_token], mask[real], segments)
    return [x[real] for x in padded], packed


OF_TOKENS = {
    "gae": lambda r, t, m, s: gae(t[0], t[1], m, 0.9, 0.8, segments=s),
    "reinforce_plus_plus": lambda r, t, m, s: reinforce_plus_plus(t[0], m, 0.9, segments=s),
    "remax": lambda r, t, m, s: remax(t[0], r[0], m, segments=s),
    "reinforce_plus_plus_baseline": lambda r, t, m, s: (
        reinforce_plus_plus_baseline(r[0], r[1], m, segments=s),
    ),
    "shape_rewards": lambda r, t, m, s: (shape_rewards(r[0], m, *t, 0.3, "k1", segments=s),),
}


@pytest.mark.parametrize("name", OF_TOKENS)
@given(answers(), st.integers(0, 4))
def test_packed_tokens_give_what_padded_ones_give(name, case, rows):
    generator, mask, poison = case
    mask = mask[:rows]
    lengths = torch.randint(0, mask.shape[1] + 1, mask.shape[:1], generator=generator)
    values = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    real = torch.arange(mask.shape[1]) < lengths.unsqueeze(1)
    tokens = [poisoned(x, mask & real, poison) for x in values]
    rows = torch.arange(len(mask))
    per_row = [rows.double() / 3, rows // 2]
    for padded, packed in zip(
        *in_both_layouts(OF_TOKENS[name], per_row, tokens, mask, lengths), strict=True
    ):
        assert padded.shape == packed.shape and padded.dtype == packed.dtype
        close(packed, padded)


OF_ROWS = {
    "group_relative": lambda s, g, n: group_relative(s, g),
    "group_relative-batch": lambda s, g, n: group_relative(s, g, "batch"),
    "leave_one_out": lambda s, g, n: leave_one_out(s, g),
    "optimal_reward_baseline": lambda s, g, n: optimal_reward_baseline(s, n, g),
    "pass_at_k": lambda s, g, n: pass_at_k(s, g),
    "maximum_likelihood": lambda s, g, n: maximum_likelihood(s, g),
    "gdpo": lambda s, g, n: gdpo(torch.stack([s, -s], 1), torch.ones(2), g),
    "overlong_penalty": lambda s, g, n: overlong_penalty(n, 8, 4),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_no_rows_and_one_row(name):
    none = OF_ROWS[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert none.shape == (0,) and none.dtype == torch.float32
    one = OF_ROWS[name](torch.tensor([3.0]), torch.tensor([7]), torch.tensor([0]))
    assert one.tolist() == [0.0]
    assert find_informative_rows(torch.zeros(0), torch.zeros(0)).shape == (0,)
    for shape in ((0, 3), (2, 0)):
        assert gae(*[torch.zeros(shape)] * 3)[0].shape == shape


@given(grouped_scores())
def test_maximum_likelihood_equals_a_loop(case):
    scores, groups = case[0].abs().tolist(), case[1].tolist()
    found = maximum_likelihood(case[0].abs(), case[1])
    for place, (group, score) in enumerate(zip(groups, scores, strict=True)):
        mine = [s for g, s in zip(groups, scores, strict=True) if g == group]
        mean = sum(mine) / len(mine)
        expected = (score - mean) / mean if mean > 1e-6 else 0.0
        assert found[place].item() == pytest.approx(expected, abs=1e-9)


def test_maximum_likelihood_has_no_meaning_for_negative_scores():
    groups = torch.tensor([0, 0, 1, 1])
    assert maximum_likelihood(torch.tensor([0.0, 0.0, 1.0, 3.0]), groups)[:2].tolist() == [0.0] * 2
    with pytest.raises(DataError, match=r"scored -3, and algorithm\.advantage=maximum_likelihood"):
        maximum_likelihood(torch.tensor([0.0, 0.0, -1.0, -3.0]), groups)


@given(grouped_scores(), st.integers(0, 9))
def test_gdpo_equals_a_loop(case, seed):
    """The second reward is unknown for some rows."""
    scores, groups, lengths = (x.tolist() for x in case)
    other = [math.nan if (n + seed) % 4 == 0 else 100.0 * n for n in lengths]
    weights, total = [1.0, 0.5], [0.0] * len(groups)
    for column, weight in zip((scores, other), weights, strict=True):
        for place, group in enumerate(groups):
            both = zip(groups, column, strict=True)
            mine = torch.tensor([s for g, s in both if g == group and not math.isnan(s)]).double()
            if len(mine) > 1 and not math.isnan(column[place]):
                total[place] += weight * float((column[place] - mine.mean()) / (mine.std() + 1e-6))
    x = torch.tensor(total).double()
    expected = (x - x.mean()) / (x.std() + 1e-6) if len(x) > 1 else 0.0 * x
    alone = torch.tensor([groups.count(group) == 1 for group in groups])
    found = gdpo(
        torch.tensor([scores, other]).double().T, torch.tensor(weights), torch.tensor(groups)
    )
    torch.testing.assert_close(found, expected.masked_fill(alone, 0.0), atol=1e-6, rtol=1e-6)


def test_gdpo_tells_equal_sums_apart():
    """Two rewards that the sum mixes up, and one of which has tiny numbers."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    groups = torch.zeros(4, dtype=torch.int64)
    found = gdpo(rewards, torch.tensor([2.0, 1.0]), groups)
    assert found[2] > found[0] > found[1] > found[3]
    tiny = gdpo(rewards * torch.tensor([1e-3, 1.0]), torch.tensor([2.0, 1.0]), groups)
    torch.testing.assert_close(tiny, found, atol=3e-3, rtol=0)

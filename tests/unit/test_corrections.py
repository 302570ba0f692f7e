"""Importance weights for the rollout engine's tokens, and the measures of the mismatch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import (
    PolicyObjective,
    TokenSegments,
    importance_weights,
    mask_far_negatives,
)
from hybridrl.errors import ConfigError

POISON = (math.nan, math.inf, -math.inf, 1e30)


@st.composite
def pairs(draw):
    """Trainer and rollout log-probabilities with poison off a mask with holes."""
    rows, time = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * time, max_size=rows * time))
    mask = torch.tensor(bits).view(rows, time)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    log_probs = -torch.rand(rows, time, generator=generator, dtype=torch.float64)
    gap = torch.randn(rows, time, generator=generator, dtype=torch.float64)
    rollout = log_probs + gap * draw(st.sampled_from([0.0, 0.1, 1.0, 30.0]))
    poison = draw(st.sampled_from(POISON))
    return torch.where(mask, log_probs, poison), torch.where(mask, rollout, poison), mask


@given(
    pairs(),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([None, 0.5]),
    st.sampled_from([None, 1.5]),
)
def test_importance_weights_equal_a_loop(case, level, mode, low, high):
    log_probs, rollout, mask = case
    expected = torch.zeros_like(log_probs)
    for row, held in enumerate(mask):
        times = held.nonzero().flatten().tolist()
        gaps = {t: min(max((log_probs - rollout)[row, t].item(), -20.0), 20.0) for t in times}
        for time in times:
            total = sum(gaps.values())
            d = {
                "token": gaps[time],
                "sequence": min(max(total, -20.0), 20.0),
                "geometric": total / len(times),
            }[level]
            w = math.exp(d)
            if mode == "truncate":
                w = min(w, math.inf if high is None else high)
            elif w < (low or 0.0) or w > (high or math.inf):
                w = 0.0
            expected[row, time] = w
    log_probs.requires_grad_()
    options = {"level": level, "mode": mode, "low": low, "high": high}
    result = importance_weights(log_probs, rollout, mask, **options)
    torch.testing.assert_close(result, expected)
    assert not result.requires_grad
    assert (result[~mask] == 0).all()
    packed = importance_weights(
        log_probs[mask],
        rollout[mask],
        mask[mask],
        **options,
        segments=TokenSegments.from_cu_seqlens(torch.tensor([0, *mask.sum(-1).cumsum(0).tolist()])),
    )
    torch.testing.assert_close(packed, result[mask])


@given(pairs(), st.sampled_from([1e-3, 0.1, 0.5]))
def test_tokens_that_two_engines_choose_otherwise_are_left_out(case, most):
    log_probs, rollout, mask = case
    rollout = torch.where(mask, rollout.clamp(max=-1e-6), rollout)
    log_probs = torch.where(mask, log_probs.clamp(max=-1e-6), log_probs)
    found = importance_weights(log_probs, rollout, mask, mode="kpop", max_kl=most)
    expected = torch.zeros_like(log_probs)
    for row, time in mask.nonzero().tolist():
        p, q = log_probs[row, time].item(), rollout[row, time].item()
        kls = [
            math.exp(a) * (a - b)
            + -math.expm1(a) * (math.log(-math.expm1(a)) - math.log(-math.expm1(b)))
            for a, b in ((p, q), (q, p))
        ]
        if max(kls) <= most:
            expected[row, time] = math.exp(min(max(p - q, -20.0), 20.0))
    torch.testing.assert_close(found, expected)


def test_a_rare_token_may_have_another_ratio_than_a_likely_one():
    inference = torch.tensor([0.8, 0.8, 0.01, 0.01]).log()
    trainer = torch.tensor([0.999, 0.9, 0.04, 0.9]).log()
    weights = importance_weights(trainer, inference, torch.ones(4), mode="kpop", max_kl=0.1)
    assert weights.tolist() == pytest.approx([0.0, 1.125, 4.0, 0.0])


def test_kpop_knows_tokens_only():
    x = torch.zeros(2)
    with pytest.raises(ConfigError, match="kpop"):
        importance_weights(x, x, x, "sequence", "kpop")


@given(pairs())
def test_mismatch_equals_a_loop(case):
    log_probs, rollout, mask = case
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, *mask.sum(-1).cumsum(0).tolist()]))
    found = PolicyObjective._mismatch(log_probs[mask], rollout[mask], segments)
    gaps = (log_probs - rollout)[mask].tolist()
    clamped = [min(max(gap, -20.0), 20.0) for gap in gaps]
    expected = {
        "mismatch_kl": [-gap for gap in gaps],
        "mismatch_k3": [min(math.exp(gap) - 1 - gap, 10.0) for gap in clamped],
        "mismatch_abs_max": [abs(gap) for gap in gaps],
        "mismatch_weight": [math.exp(gap) for gap in clamped],
        "mismatch_weight_square": [math.exp(gap) ** 2 for gap in clamped],
    }
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, rel=1e-6, abs=1e-12), name
    rows = zip((rollout - log_probs), mask, strict=True)
    ratios = [math.exp(gap[held].mean().item()) if held.any() else 1.0 for gap, held in rows]
    assert found["mismatch_ppl_ratio_by_row"].tolist() == pytest.approx(ratios, rel=1e-6)


@given(pairs(), st.sampled_from([0.01, 0.3, 2.0]))
def test_far_negatives_equal_a_loop(case, limit):
    log_probs, rollout, mask = case
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    segments = TokenSegments.from_mask(mask)
    near = mask_far_negatives(log_probs, rollout, advantages, limit, segments)
    for row, held in enumerate(mask):
        gaps = (rollout - log_probs)[row, held].tolist()
        is_far = bool(gaps) and math.fsum(gaps) / len(gaps) > limit
        for time in held.nonzero().flatten().tolist():
            assert bool(near[row, time]) is not (is_far and bool(advantages[row, time] < 0))


def test_the_objective_leaves_far_negatives_out():
    log_probs = torch.tensor([-2.0, -3.0, -1.0, -1.0], requires_grad=True)
    columns = {
        "advantages": torch.tensor([-1.0, 1.0, -1.0, 1.0]),
        "response_mask": torch.ones(4, dtype=torch.bool),
        "rollout_log_probs": torch.tensor([-1.0, -1.0, -1.0, -1.1]),
    }
    outputs = {"log_probs": log_probs, "entropy": torch.zeros(4)}
    segments = TokenSegments.from_cu_seqlens(torch.tensor([0, 2, 4]))
    objective = PolicyObjective("reinforce", negative_kl_max=0.5)
    found = objective(outputs, columns, segments)
    assert found.metrics["masked_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert gradient.tolist() == [0.0, -1.0, 1.0, -1.0]


def test_wrong_settings_are_refused():
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="Did you mean `sequence`"):
        importance_weights(x, x, x, level="sequences")
    with pytest.raises(ConfigError, match="Did you mean `truncate`"):
        importance_weights(x, x, x, mode="truncated")
    with pytest.raises(ConfigError, match="low"):
        importance_weights(x, x, x, mode="mask", low=3.0, high=2.0)


def test_no_tokens_give_no_weights():
    none, segments = (
        torch.zeros(0),
        TokenSegments.from_cu_seqlens(torch.zeros(1, dtype=torch.int64)),
    )
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            found = importance_weights(none, none, none, level, mode, segments=segments)
            assert found.shape == (0,) and found.dtype == torch.float32
    padded = torch.zeros(0, 4)
    assert importance_weights(padded, padded, padded, level="sequence").shape == (0, 4)

"""Policy and value losses: values against scalar formulas, gradients, masks and splits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import (
    TokenSegments,
    cispo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    negative_log_likelihood,
    ppo_clip,
    reinforce,
    sapo,
    token_weights,
    value_loss,
    vespo,
)
from hybridrl.errors import ConfigError

POISON = (math.nan, math.inf, -math.inf, 1e30)
MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)
ELEMENTWISE = {
    "ppo_clip": lambda *x, **k: ppo_clip(*x, **k, clip_low=0.1, clip_high=0.3),
    "dual_clip": lambda *x, **k: ppo_clip(*x, **k, dual_clip=1.5),
    "cispo": lambda *x, **k: cispo(*x, **k, clip_low=0.1, clip_high=0.3),
    "reinforce": reinforce,
    "sapo": sapo,
    "dppo_tv": lambda *x, **k: dppo_tv(*x, **k, clip_low=0.02, clip_high=0.05),
    "dppo_kl": lambda *x, **k: dppo_kl(*x, **k, clip_low=0.001, clip_high=0.01),
    "value": lambda *x, **k: value_loss(*x, **k, clip=0.3),
    "supervised": lambda x, _, __, **k: negative_log_likelihood(x, **k),
}
BY_SAMPLE = {
    "gspo": lambda *x, **k: gspo(*x, **k, clip_low=0.1, clip_high=0.3),
    "gmpo": gmpo,
    "vespo": vespo,
}


def apply(name, tensors, mask, segments):
    if name in ELEMENTWISE:
        return ELEMENTWISE[name](*tensors, mask=mask)
    return BY_SAMPLE[name](*tensors, segments=segments)


def scalar_loss(name, log_prob, old, advantage):
    """The formulas again, one token at a time."""
    d = min(max(log_prob - old, -20.0), 20.0)
    r = math.exp(d)
    if name in ("ppo_clip", "dual_clip"):
        low, high = (0.9, 1.3) if name == "ppo_clip" else (0.8, 1.2)
        loss = max(-advantage * r, -advantage * min(max(r, low), high))
        if name == "dual_clip" and advantage < 0:
            loss = min(loss, -advantage * 1.5)
        return loss
    if name == "cispo":
        return -min(max(r, 0.9), 1.3) * advantage * log_prob
    if name == "reinforce":
        return -advantage * log_prob
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(log_prob), math.exp(old)
        far, low, high = abs(p - q), 0.02, 0.05
        if name == "dppo_kl":
            # Rounding of the reference, at probabilities of 1 to twelve digits.
            rest = max(1 - p, 1e-8), max(1 - q, 1e-8)
            far = q * (old - log_prob) + rest[1] * math.log(rest[1] / rest[0])
            low, high = 0.001, 0.01
        rises, falls = advantage > 0 and p > q, advantage < 0 and p < q
        return 0.0 if (rises and far > high) or (falls and far > low) else -advantage * r
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -advantage / (1.0 + math.exp(-tau * (r - 1.0))) * 4.0 / tau
    if name == "value":
        near = min(max(log_prob, old - 0.3), old + 0.3)
        return 0.5 * max((log_prob - advantage) ** 2, (near - advantage) ** 2)
    return -log_prob


@st.composite
def batches(draw, dtype=torch.float64):
    """log_probs, old_log_probs, advantages and a mask with holes and empty rows."""
    rows, time = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    bits = draw(st.lists(st.booleans(), min_size=rows * time, max_size=rows * time))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    log_probs = -torch.rand(rows, time, generator=generator, dtype=dtype) * 3
    gap = torch.randn(rows, time, generator=generator, dtype=dtype)
    old = log_probs + gap * draw(st.sampled_from([0.0, 0.2, 1.0, 15.0]))
    advantages = torch.randn(rows, time, generator=generator, dtype=dtype)
    return (log_probs, old, advantages), torch.tensor(bits).view(rows, time)


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(case=batches())
@settings(max_examples=15)
def test_elementwise_losses_equal_the_scalar_formulas(name, case):
    tensors, _ = case
    result = ELEMENTWISE[name](*tensors)
    flat = zip(*(x.flatten().tolist() for x in tensors), strict=True)
    expected = [scalar_loss(name, *token) for token in flat]
    torch.testing.assert_close(result.loss.flatten(), torch.tensor(expected, dtype=torch.float64))


@given(batches())
def test_gspo_equals_the_formula_per_answer(case):
    (log_probs, old, advantages), mask = case
    result = gspo(
        log_probs,
        old,
        advantages,
        segments=TokenSegments.from_mask(mask),
        clip_low=0.1,
        clip_high=0.3,
    )
    for row, held in enumerate(mask):
        if not held.any():
            continue
        ratio = min(10.0, (log_probs - old)[row, held].mean().item())
        ratio = math.exp(ratio)
        for time in held.nonzero().flatten().tolist():
            a = advantages[row, time].item()
            expected = max(-a * ratio, -a * min(max(ratio, 0.9), 1.3))
            assert result.loss[row, time].item() == pytest.approx(expected)
            assert result.metrics["ratio"][row, time].item() == pytest.approx(ratio)


@given(batches())
def test_gspo_under_seq_mean_token_mean_has_the_gradient_of_the_answer_objective(case):
    (log_probs, old, _), mask = case
    old = log_probs + 0.3 * (old - log_probs).clamp(-1, 1)
    scores = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
    by_token = log_probs.clone().requires_grad_()
    loss = gspo(
        by_token, old, scores[:, None].expand(mask.shape), segments=TokenSegments.from_mask(mask)
    ).loss
    (token_weights(mask.double(), "seq-mean-token-mean") * loss).sum().backward()

    by_answer = log_probs.clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    answers = mask.any(-1).nonzero().flatten().tolist()
    for row in answers:
        ratio = (by_answer - old)[row, mask[row]].mean().exp()
        clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        objective = objective - torch.minimum(scores[row] * ratio, scores[row] * clipped)
    if answers:
        (objective / len(answers)).backward()
        torch.testing.assert_close(by_token.grad, by_answer.grad)


@given(batches())
def test_gmpo_equals_a_product_over_the_answer(case):
    (log_probs, old, advantages), mask = case
    result = gmpo(log_probs, old, advantages, segments=TokenSegments.from_mask(mask))
    for row, held in enumerate(mask):
        times = held.nonzero().flatten().tolist()
        product = 1.0
        for time in times:
            ratio = math.exp(min(max((log_probs - old)[row, time].item(), -20.0), 20.0))
            held_ratio = min(max(ratio, math.exp(-0.4)), math.exp(0.4))
            pick = min if advantages[row, time] > 0 else max
            product *= pick(ratio, held_ratio) ** (1.0 / len(times))
        for time in times:
            expected = -advantages[row, time].item() * product
            assert result.loss[row, time].item() == pytest.approx(expected, rel=1e-6)


@given(batches())
def test_vespo_equals_a_product_over_the_answer(case):
    (log_probs, old, advantages), mask = case
    result = vespo(log_probs, old, advantages, segments=TokenSegments.from_mask(mask))
    for row, held in enumerate(mask):
        gaps = [min(max(x, -20.0), 20.0) for x in (log_probs - old)[row, held].tolist()]
        log_ratio = min(max(math.fsum(gaps), -20.0), 20.0)
        for time in held.nonzero().flatten().tolist():
            a = advantages[row, time].item()
            k, fall = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            weight = math.exp(k * log_ratio + fall * (1 - math.exp(log_ratio)))
            expected = -weight * a * log_probs[row, time].item()
            assert result.loss[row, time].item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_divergence_leaves_likely_tokens_out_that_a_ratio_keeps():
    probabilities = torch.tensor([[0.99, 0.02], [0.80, 0.01]]).log()
    for loss in (dppo_tv, dppo_kl):
        found = loss(probabilities[0], probabilities[1], torch.ones(2), clip_low=0.1, clip_high=0.1)
        assert found.metrics["clip_fraction"].tolist() == [1.0, 0.0]
    ratio = ppo_clip(probabilities[0], probabilities[1], torch.ones(2), clip_high=0.25)
    assert ratio.metrics["clip_fraction"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", [*ELEMENTWISE, *BY_SAMPLE])
@given(case=batches(), poison=st.sampled_from(POISON), other=st.sampled_from(POISON))
@settings(max_examples=12)
def test_off_the_mask_nothing_matters(name, case, poison, other):
    tensors, mask = case
    clean, dirty = (
        [torch.where(mask, x, value).requires_grad_() for x, value in zip(tensors, v, strict=True)]
        for v in ((0.0, 0.0, 0.0), (poison, other, poison))
    )
    segments = TokenSegments.from_mask(mask)
    before = [x.detach().clone() for x in dirty]
    expected, result = apply(name, clean, mask, segments), apply(name, dirty, mask, segments)
    assert torch.equal(result.loss, expected.loss)
    assert (result.loss[~mask] == 0).all()
    for metric in result.metrics.values():
        assert not metric.requires_grad
        assert (metric[~mask] == 0).all()
    result.loss.sum().backward()
    expected.loss.sum().backward()
    assert torch.isfinite(dirty[0].grad).all()
    assert torch.equal(dirty[0].grad, clean[0].grad)
    assert dirty[1].grad is None and dirty[2].grad is None
    for x, was in zip(dirty, before, strict=True):
        assert torch.equal(x.nan_to_num(), was.nan_to_num())


@pytest.mark.more
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *BY_SAMPLE])
@given(case=batches(), seed=st.integers(0, 1000), parts=st.integers(1, 4), packed=st.booleans())
@settings(max_examples=8)
def test_any_split_gives_the_same_loss_and_gradient(name, mode, case, seed, parts, packed):
    tensors, mask = case
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(*mask.shape, 3, generator=generator, dtype=torch.float64) * 0.1
    weights = token_weights(mask.double(), mode)

    def run(rows, as_packed):
        """The loss of some rows under a model of three parameters, and its gradient."""
        model = torch.tensor([0.1, -0.2, 0.05], dtype=torch.float64, requires_grad=True)
        log_probs = tensors[0][rows] + features[rows] @ model
        held, weight = mask[rows], weights[rows]
        inputs = [log_probs, tensors[1][rows], tensors[2][rows]]
        segments = TokenSegments.from_mask(held)
        if as_packed:
            cu_seqlens = torch.tensor([0, *held.sum(-1).cumsum(0).tolist()])
            segments = TokenSegments.from_cu_seqlens(cu_seqlens)
            inputs = [x[held] for x in inputs]
            weight, held = weight[held], held[held]
        loss = (weight * apply(name, inputs, held, segments).loss).sum()
        return loss.detach(), torch.autograd.grad(loss, model)[0]

    owner = torch.randint(parts, (len(mask),), generator=generator)
    whole = run(torch.arange(len(mask)), False)
    pieces = [run((owner == part).nonzero().flatten(), packed) for part in range(parts)]
    for index in range(2):
        torch.testing.assert_close(sum(piece[index] for piece in pieces), whole[index])


def test_metrics_by_hand():
    log_probs = torch.tensor([0.0, 0.0, 0.0, 0.0]) - 1
    ratio = torch.tensor([1.5, 1.5, 0.5, 4.0])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    result = ppo_clip(log_probs, log_probs - ratio.log(), advantages, dual_clip=3.0)
    torch.testing.assert_close(result.loss, torch.tensor([-1.2, 1.5, 0.8, 3.0]))
    assert result.metrics["clip_fraction"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert result.metrics["dual_clip_fraction"].tolist() == [0.0, 0.0, 0.0, 1.0]
    torch.testing.assert_close(result.metrics["ratio"], ratio)
    torch.testing.assert_close(result.metrics["approx_kl"], -ratio.log())


def test_clipped_tokens_have_no_gradient_and_cispo_keeps_it():
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = torch.tensor([-2.0, -1.0])
    advantages = torch.ones(2)
    (gradient,) = torch.autograd.grad(ppo_clip(log_probs, old, advantages).loss.sum(), log_probs)
    assert gradient.tolist() == [0.0, -1.0]
    (gradient,) = torch.autograd.grad(cispo(log_probs, old, advantages).loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-1.2, -1.0]))


@pytest.mark.parametrize(
    "name",
    ["ppo_clip", "cispo", "reinforce", "sapo", "gspo", "gmpo", "dppo_tv", "dppo_kl", "vespo"],
)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    scores = torch.randn(3, 1, generator=generator, dtype=torch.float64).expand(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    leaf = log_probs.clone().requires_grad_()
    result = apply(name, (leaf, log_probs, scores), mask, TokenSegments.from_mask(mask))
    result.loss.sum().backward()
    torch.testing.assert_close(leaf.grad, -scores.clone())


def test_gspo_sees_differences_far_below_float32_of_the_log_probability():
    log_probs = torch.full((1, 8), -97.0)
    old = log_probs.clone()
    old[0, 0] -= 9.2e-5
    segments = TokenSegments.from_mask(torch.ones(1, 8))
    ratio = gspo(log_probs, old, torch.ones(1, 8), segments=segments).metrics["ratio"]
    expected = math.exp((log_probs.double() - old.double()).mean().item())
    assert ratio[0, 0].item() - 1 == pytest.approx(expected - 1, rel=0.1)


def test_value_loss_by_hand():
    result = value_loss(
        torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 1.0]), clip=0.5
    )
    assert result.loss.tolist() == [0.5 * 2.5**2, 0.5]
    assert result.metrics["clip_fraction"].tolist() == [1.0, 0.0]
    plain = value_loss(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([3.0]))
    assert plain.loss.tolist() == [0.5]
    assert plain.metrics["clip_fraction"].tolist() == [0.0]


def test_low_precision_is_lifted_and_double_is_kept():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x = torch.tensor([[-1.0, -2.0]], dtype=dtype)
        mask = torch.ones(1, 2, dtype=torch.bool)
        for name in (*ELEMENTWISE, *BY_SAMPLE):
            result = apply(name, (x, x, x), mask, TokenSegments.from_mask(mask))
            assert result.loss.dtype == expected
            assert all(metric.dtype == expected for metric in result.metrics.values())


def test_wrong_options_are_refused():
    x = torch.zeros(1)
    with pytest.raises(ConfigError, match="dual_clip"):
        ppo_clip(x, x, x, dual_clip=1.0)
    with pytest.raises(ConfigError, match="tau_negative"):
        sapo(x, x, x, tau_negative=0.0)


@pytest.mark.parametrize("name", [*ELEMENTWISE, *BY_SAMPLE])
def test_no_tokens_have_no_loss(name):
    none = torch.zeros(0, requires_grad=True)
    segments = TokenSegments.from_cu_seqlens(torch.zeros(1, dtype=torch.int64))
    result = apply(name, (none, none.detach(), none.detach()), none.detach().bool(), segments)
    assert all(x.shape == (0,) and x.dtype == torch.float32 for x in result.metrics.values())
    (gradient,) = torch.autograd.grad(result.loss.sum(), none)
    assert gradient.shape == (0,)

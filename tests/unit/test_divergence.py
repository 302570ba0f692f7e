"""Divergence of a model from a teacher of whom the likeliest tokens are known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms.distillation_loss import KL_DIRECTIONS
from hybridrl.models import log_probs
from hybridrl.models.teacher_kl import TopTokens, find_top_tokens, teacher_kl_loss

HIDDEN, VOCABULARY, TOKENS = 6, 11, 5


def drawn(seed, scale=2.0):
    torch.manual_seed(seed)
    states = (torch.randn(TOKENS, HIDDEN) * scale).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN).requires_grad_()
    return states, weight, torch.randn(TOKENS, VOCABULARY).mul(scale).log_softmax(1)


def expected(log_p, log_q, ids, kind):
    """By the whole distributions, with the tokens that are not listed as one event."""

    def events(logs):
        listed = logs.gather(1, ids)
        beyond = logs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        return torch.cat([listed, beyond], 1) if ids.shape[1] < logs.shape[1] else listed

    p, q = events(log_p), events(log_q)
    return ((p.exp() * (p - q)) if kind == "reverse" else (q.exp() * (q - p))).sum(1)


@pytest.mark.parametrize("kind", KL_DIRECTIONS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, VOCABULARY))
def test_value_and_gradients_are_those_of_the_whole_distributions(kind, seed, k):
    states, weight, log_q = drawn(seed)
    teacher, ids = log_q.topk(k, dim=1)
    found = teacher_kl_loss(states, weight, TopTokens(ids, teacher), kind, 0.7)
    log_p = (states @ weight.T / 0.7).log_softmax(1)
    wanted = expected(log_p, log_q, ids, kind)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    factors = torch.randn(TOKENS)
    mine = torch.autograd.grad((found * factors).sum(), (states, weight))
    theirs = torch.autograd.grad((wanted * factors).sum(), (states, weight))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", KL_DIRECTIONS)
def test_a_model_that_is_its_own_teacher_is_at_no_distance(kind):
    states, weight, _ = drawn(0)
    candidates = find_top_tokens(states, weight, 4, 0.7)
    found = teacher_kl_loss(states, weight, candidates, kind, 0.7)
    torch.testing.assert_close(found, torch.zeros(TOKENS), atol=1e-5, rtol=0)
    found.sum().backward()
    assert states.grad.abs().max() < 1e-4


@pytest.mark.parametrize("kind", KL_DIRECTIONS)
def test_what_is_impossible_for_the_model_gives_no_nan(kind):
    states = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    candidates = TopTokens(torch.tensor([[2]]), torch.tensor([[-0.1]]))
    found = teacher_kl_loss(states, weight, candidates, kind)
    found.sum().backward()
    assert found.isfinite().all() and states.grad.isfinite().all()


@pytest.mark.parametrize("kind", KL_DIRECTIONS)
def test_tokens_that_only_the_teacher_has_are_beyond_its_list(kind):
    states, weight, log_q = drawn(5)
    teacher, ids = log_q[:, :-2].topk(4, dim=1)
    unknown = torch.full((TOKENS, 1), VOCABULARY + 3)
    more = TopTokens(torch.cat([ids, unknown], 1), torch.cat([teacher, log_q[:, -1:]], 1))
    gradients = []
    for candidates in (TopTokens(ids, teacher), more):
        found = teacher_kl_loss(states, weight, candidates, kind)
        assert found.isfinite().all()
        gradients.append((found, *torch.autograd.grad(found.sum(), (states, weight))))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_likeliest_tokens_with_their_log_probabilities(monkeypatch):
    states, weight, _ = drawn(3)
    wanted = (states @ weight.T).log_softmax(1).topk(3, dim=1)
    for at_a_time in (VOCABULARY, 10_000):  # chunk by chunk, and all at once
        monkeypatch.setattr(log_probs, "logits_per_chunk", lambda _, size=at_a_time: size)
        found = find_top_tokens(states, weight, 3)
        assert torch.equal(found.ids, wanted.indices)
        torch.testing.assert_close(found.log_probs, wanted.values)
    assert find_top_tokens(states, weight, 99).ids.shape == (TOKENS, VOCABULARY)


def test_no_tokens():
    weight = torch.randn(VOCABULARY, HIDDEN)
    nothing = torch.empty(0, HIDDEN, requires_grad=True)
    candidates = find_top_tokens(nothing, weight, 3)
    teacher_kl_loss(nothing, weight, candidates, "reverse").sum().backward()
    assert candidates.ids.shape == (0, 3) and nothing.grad.shape == (0, HIDDEN)

"""Log-probabilities and entropy by parts of the logits: the numbers of plain torch, and how often
the logits are read and written for them."""

import sys
import threading
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models import log_probs
from hybridrl.models.log_probs import VocabularyShard, token_log_probs

SCALES = [(1.0, None), (0.7, None), (1.0, 3.0), (0.7, 30.0)]
"""Temperatures and soft caps."""


def drawn(tokens, vocabulary, hidden, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = 2 * torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    factors = torch.randn(2, tokens, generator=generator)
    return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, factors


def plain(states, weight, targets, temperature, soft_cap):
    """All logits at once, in double precision."""
    logits = states.double() @ weight.double().T
    if soft_cap is not None:
        logits = soft_cap * (logits / soft_cap).tanh()
    logs = (logits / temperature).log_softmax(1)
    return logs.gather(1, targets[:, None]).squeeze(1), -(logs.exp() * logs).sum(1)


def with_gradients(outputs, inputs, factors):
    loss = sum((factor * out).sum() for factor, out in zip(factors, outputs, strict=True))
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def assert_near(found, wanted, bound):
    """To a fraction of the largest number of each."""
    for one, other in zip(found, wanted, strict=True):
        if one.numel():
            one, other = one.detach().double(), other.detach().double()
            assert float((one - other).abs().max()) <= bound * max(1.0, float(other.abs().max()))


@given(
    *(st.integers(0, 9), st.integers(1, 40), st.integers(1, 7), st.sampled_from(SCALES)),
    *(st.sampled_from([1, 7, 30, 1000]), st.integers(0, 99)),
)
def test_parts_of_any_size_give_the_numbers_of_plain_torch(
    tokens, vocabulary, hidden, scale, at_once, seed
):
    states, weight, targets, factors = drawn(tokens, vocabulary, hidden, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_probs, "logits_per_chunk", lambda _: at_once)
        found = token_log_probs(states, weight, targets, scale[0], soft_cap=scale[1])
        found = with_gradients(found, (states, weight), factors)
    wanted = plain(states, weight, targets, *scale)
    assert_near(found, with_gradients(wanted, (states, weight), factors), 2e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_half_precision_rounds_states_and_gradients_only(scale):
    states, weight, targets, factors = drawn(33, 301, 17, torch.bfloat16)
    found = token_log_probs(states, weight, targets, scale[0], soft_cap=scale[1])
    wanted = plain(states, weight, targets, *scale)
    assert_near(found, wanted, 2e-6)
    gradients = (with_gradients(each, (states, weight), factors)[2:] for each in (found, wanted))
    assert_near(*gradients, 2**-8)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_alone_has_its_own_gradient(which):
    states, weight, targets, factors = drawn(5, 11, 3)
    found, wanted = (
        torch.autograd.grad((each[which] * factors[0]).sum(), (states, weight))
        for each in (
            token_log_probs(states, weight, targets),
            plain(states, weight, targets, 1.0, None),
        )
    )
    assert_near(found, wanted, 2e-6)


class Ring:
    """Stands for a process group of threads."""

    def __init__(self, ranks):
        self.barrier, self.parts = threading.Barrier(ranks), []

    def all_reduce(self, tensor, op=None, group=None):
        self.parts.append(tensor.clone())
        self.barrier.wait()
        parts = torch.stack(self.parts)
        tensor.copy_(parts.sum(0) if op is None else parts.amax(0))
        if self.barrier.wait() == 0:
            self.parts.clear()
        self.barrier.wait()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bounds", [(0, 13, 41), (0, 1, 2, 41)])
def test_a_vocabulary_that_is_cut(bounds, scale, monkeypatch):
    states, weight, targets, factors = drawn(7, 41, 5)
    ring = Ring(len(bounds) - 1)
    monkeypatch.setattr(log_probs.dist, "all_reduce", ring.all_reduce)
    monkeypatch.setattr(log_probs, "logits_per_chunk", lambda _: 20)
    found = {}

    def rank(number):
        mine = weight[bounds[number] : bounds[number + 1]].detach().requires_grad_()
        own = states.detach().requires_grad_()
        shard = VocabularyShard(bounds[number], ring)
        outputs = token_log_probs(own, mine, targets, scale[0], shard, scale[1])
        found[number] = with_gradients(outputs, (own, mine), factors)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(bounds) - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = with_gradients(plain(states, weight, targets, *scale), (states, weight), factors)
    for each in found.values():
        assert_near(each[:3], wanted[:3], 2e-6)
    assert_near([torch.cat([found[n][3] for n in sorted(found)])], wanted[3:], 2e-6)


FEW = {"empty_like", "new_zeros", "new_ones", "scatter_add_", "gather", "detach"}
"""Operations that touch few elements of what they are given, or none."""


class Passes(TorchDispatchMode):
    """Counts how often an operation reads or writes a whole tensor of this many elements."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        if not operation.is_view and operation.overloadpacket.__name__ not in FEW:
            tensors = (*args, *(kwargs or {}).values(), found)
            self.count += sum(
                isinstance(x, torch.Tensor) and x.numel() == self.elements for x in tensors
            )
        return found


class Kernels(ModuleType):
    """Stands for `hybridrl.models.head_kernels`: each of its kernels goes over its tensors once."""

    def __init__(self, passes):
        super().__init__("hybridrl.models.head_kernels")
        self.passes = passes

    def sum_exponentials(self, products, temperature, soft_cap):
        self.passes.count += 1
        return products.new_zeros(len(products)), products.new_ones(len(products), 2)

    def differentiate_log_probs(self, products, *rest):
        self.passes.count += 2
        return products


@pytest.mark.parametrize(("by_kernels", "most"), [(False, (11, 11)), (True, (2, 5))])
def test_logits_are_gone_over_few_times(by_kernels, most, monkeypatch):
    """The products that make logits and those that take their gradient count, too."""
    states, weight, targets, _ = drawn(13, 29, 3)
    with Passes(13 * 29) as passes:
        monkeypatch.setattr(log_probs, "has_triton", lambda _: by_kernels)
        monkeypatch.setitem(sys.modules, "hybridrl.models.head_kernels", Kernels(passes))
        found, _ = token_log_probs(states, weight, targets)
        forward = passes.count
        found.sum().backward()
    assert (forward, passes.count - forward) == most


@pytest.mark.parametrize(("tokens", "parts"), [(1, (1, 1)), (100, (1, 10)), (250, (3, 10))])
def test_blocks_are_as_long_as_chunks_where_there_are_many_tokens(tokens, parts, monkeypatch):
    monkeypatch.setattr(log_probs, "logits_per_chunk", lambda _: 10_000)
    chunks, blocks = log_probs.split_logits(tokens, torch.empty(1000, 3))
    assert (len(chunks), len(blocks)) == parts
    assert sum(x.stop - x.start for x in chunks) == tokens
    assert sum(x.stop - x.start for x in blocks) == 1000

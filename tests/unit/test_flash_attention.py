"""Flash attention, which needs a GPU, by stand-ins that compute what its kernels promise."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from flash_kernels import aten_backward, aten_forward
from torch.nn.attention import _fa4
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models import flash_attention, packed_attention
from hybridrl.models.flash_attention import FLASH_4, FlashCase, _choose_kernel, flash_forward
from hybridrl.models.packed_attention import causal_attention
from hybridrl.models.packed_samples import PackingMetadata

CPU = torch.device("cpu")
BOUNDS = torch.tensor([0, 7, 8, 21])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("width", [8, 5])
def test_sinks_and_windows_are_those_of_rectangles(monkeypatch, window, with_sinks, width):
    generator = torch.Generator().manual_seed(0)
    shapes = [(21, 4, 8), (21, 2, 8), (21, 2, width), (21, 4, width)]
    q, k, v, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    inputs = [x.requires_grad_() for x in (q, k, v, *([sinks] if with_sinks else []))]
    packing = PackingMetadata.of(BOUNDS, CPU)

    def computed():
        out = causal_attention(q, k, v, packing, 0.3, window, sinks)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    wanted = computed()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    monkeypatch.setattr(packed_attention, "fits_flash", lambda q: True)
    for found, other in zip(computed(), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-5)


def test_rectangles_are_made_once_for_all_layers(monkeypatch):
    made = []
    group = packed_attention.AttentionBucket.of
    monkeypatch.setattr(
        "hybridrl.models.packed_samples.AttentionBucket.of",
        lambda *arguments: made.append(1) or group(*arguments),
    )
    packing = PackingMetadata.of(torch.tensor([0, 9]), CPU)
    q, k, v = torch.randn(3, 9, 2, 8)
    for _ in range(3):
        causal_attention(q, k, v, packing, None, None)
    assert len(made) == 1


class Registry:
    """Stands for torch's kernels: which is active, and which of them are right."""

    def __init__(self, monkeypatch, capability, right):
        self.active, self.right = None, right
        names = flash_attention.attention
        monkeypatch.setattr(flash_attention, "read_compute_capability", lambda _: capability)
        monkeypatch.setattr(flash_attention, "_CAPABILITIES", dict(flash_attention._CAPABILITIES))
        monkeypatch.setattr(names, "register_flash_attention_impl", lambda *_, **__: None)
        monkeypatch.setattr(names, "activate_flash_attention_impl", self.activate)
        monkeypatch.setattr(names, "current_flash_attention_impl", lambda: self.active)
        monkeypatch.setattr(names, "restore_flash_attention_impl", lambda: self.activate(None))
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", self.backward)
        _choose_kernel.cache_clear()

    def activate(self, name):
        if name == "FA3" and "FA3" not in self.right:
            raise ImportError(name)
        self.active = name

    def backward(self, *args, window_size_left, **kwargs):
        """Without its window where it is not right."""
        is_right = self.active is None or self.right[self.active](window_size_left)
        left = window_size_left if is_right else 10_000
        found = aten_backward(*args, window_size_left=left, **kwargs)
        return found if is_right is not None else tuple(x * torch.nan for x in found)


def attend(window):
    q, k, v = torch.randn(3, 21, 2, 8)
    bounds = BOUNDS.int()
    return flash_forward(q, k, v, FlashCase(bounds, 13, bounds, 13, True, 0.3, window))


def always(_):
    return True


def without_windows(left):
    return left < 0


def never(_):
    return None  # not a number


@pytest.mark.parametrize(
    ("capability", "right", "chosen"),
    [
        (9, {"FA4": always, "FA3": always}, ["FA4", "FA4"]),
        (10, {"FA4": always}, ["FA4", "FA4"]),
        (9, {"FA4": without_windows, "FA3": always}, ["FA4", "FA3"]),
        (9, {"FA4": without_windows}, ["FA4", None]),
        (9, {"FA4": never}, [None, None]),
        (10, {"FA4": without_windows, "FA3": always}, ["FA4", None]),
        (8, {"FA4": always, "FA3": always}, [None, None]),
        (0, {"FA4": always}, [None, None]),
    ],
)
def test_the_best_kernel_that_is_right_runs(monkeypatch, capability, right, chosen):
    """First without a window, then with one; what has failed is not tried again."""
    registry = Registry(monkeypatch, capability, right)
    for window, name in zip((None, 4), chosen, strict=True):
        attend(window)
        assert registry.active == name
    attend(None)
    assert registry.active == chosen[1]


def test_what_came_before_is_compared_with_the_next_kernel_too(monkeypatch):
    right = {"FA4": without_windows, "FA3": lambda left: True if left >= 0 else None}
    registry = Registry(monkeypatch, 9, right)
    attend(None)
    attend(4)
    assert registry.active == "FA3"
    attend(None)
    assert registry.active is None


def test_comparing_leaves_no_trace(monkeypatch):
    """Neither in random numbers nor in what activation checkpointing keeps."""
    Registry(monkeypatch, 9, {"FA4": always})
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen[-1].append(operation)
            return operation(*args, **(kwargs or {}))

    state = torch.get_rng_state()
    q, k, v = torch.ones(3, 21, 2, 8)
    bounds = BOUNDS.int()
    for _ in range(2):
        seen.append([])
        with Watch():
            flash_forward(q, k, v, FlashCase(bounds, 13, bounds, 13, True, 0.3))
    assert seen[0] and seen[0] == seen[1]
    assert torch.get_rng_state().equal(state)


def test_torch_takes_flash_attention_4_with_its_four_results(monkeypatch):
    """By torch's own code around it."""
    vllms = ModuleType(FLASH_4)
    vllms._flash_attn_fwd = lambda q, k, v, **kwargs: (q + k, q.sum(-1).T, None, None)
    vllms._flash_attn_bwd = lambda q, k, v, out, grad, lse, **kwargs: (grad, out, v)
    monkeypatch.setitem(sys.modules, FLASH_4, vllms)
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", flash_attention.__name__)
    q, k, v = torch.randn(3, 5, 2, 8)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    given = {"query": q, "key": k, "value": v, "cu_seq_q": bounds, "cu_seq_k": bounds}
    given |= {"max_q": 5, "max_k": 5, "scale": 0.3, "is_causal": True, "seqused_k": None}
    given |= {"window_size_left": -1, "window_size_right": 0}

    def run(function, **further):  # torch 2.11 passes on less
        takes = inspect.signature(function).parameters
        return function(**{name: x for name, x in (given | further).items() if name in takes})

    out, lse = run(_fa4._fa4_run_forward)
    assert out.equal(q + k) and lse.equal(q.sum(-1).T)
    grads = run(_fa4._fa4_run_backward, grad_out=q, out=out, logsumexp=lse)
    assert all(a.equal(b) for a, b in zip(grads, (q, out, v), strict=True))

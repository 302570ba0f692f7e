"""Flash attention of samples of any length, through torch's operations for it, which run the best
kernel that is installed: FlashAttention 4, which vLLM's CUDA wheel contains, on Hopper and
Blackwell GPUs; then FlashAttention 3, if its package is; then torch's own, FlashAttention 2.

Not every FlashAttention 4 has all widths of heads, and torch 2.11 does not tell its backward about
windows. A process therefore compares a kernel with torch's on a few tokens before it uses it.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention
from torch.utils._python_dispatch import _disable_current_modes

from hybridrl.system.device_traits import read_compute_capability

_log = logging.getLogger(__name__)

FLASH_4 = "vllm.vllm_flash_attn.cute.interface"
_CAPABILITIES = {"FA4": (9, 10), "FA3": (9,)}
"""Kernels of others, best first, by torch's name, with the compute capabilities that they run on.
One that fails is removed."""
_MAX_DIFFERENCE = 0.02
"""Of results, by their norms: a few times the rounding of bfloat16."""


class FlashCase(NamedTuple):
    """The bounds of the samples of an attention call, and which keys each query sees.

    Attributes:
        query_bounds: int32 `[samples + 1]`, the bounds of the samples' queries.
        longest_query: The largest number of queries of a sample.
        key_bounds, longest_key: The same for keys.
        causal: Query i of a sample sees its keys 0 to i; otherwise it sees all of them.
        scale: Scores are multiplied by it.
        window: How many keys a causal query sees, its own included; None for all before it.
    """

    query_bounds: Tensor
    longest_query: int
    key_bounds: Tensor
    longest_key: int
    causal: bool
    scale: float
    window: int | None = None

    def limits(self) -> tuple[int, int]:
        """Return how many keys a query sees to its left and to its right; -1 for all."""
        return -1 if self.window is None else self.window - 1, 0 if self.causal else -1


class PromptCase(NamedTuple):
    """The attention of responses to the prompts that they share.

    Attributes:
        queries: int64, the places of the responses' tokens in the packed row.
        keys: Of the prompts' tokens.
        bounds: Every response token of a prompt sees all of its tokens.
    """

    queries: Tensor
    keys: Tensor
    bounds: FlashCase


def flash_forward(q: Tensor, k: Tensor, v: Tensor, case: FlashCase) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        q: `[queries, heads, head_dim]`, contiguous, as are k and v, `[keys, key-value heads,
            head_dim]`.

    Returns:
        The output, like `q`, and the logarithm of its softmax's denominator (`lse`), float32
        `[heads, queries]`.
    """
    _choose_kernel(q.device, q.dtype, q.shape[1:], k.shape[1], case.causal, case.window is None)
    return _forward(q, k, v, case)


def _forward(q: Tensor, k: Tensor, v: Tensor, case: FlashCase) -> tuple[Tensor, Tensor]:
    left, right = case.limits()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, case.query_bounds, case.key_bounds, case.longest_query, case.longest_key),
        0.0,
        case.causal and case.window is None,
        return_debug_mask=False,
        scale=case.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: FlashCase
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v. All tensors are contiguous.

    Args:
        grad: Gradient of the output.
        out, lse: Those of all that the queries see, which may be more than these keys.
    """
    left, right = case.limits()
    return torch.ops.aten._flash_attention_backward(
        *(grad, q, k, v, out, lse, case.query_bounds, case.key_bounds),
        *(case.longest_query, case.longest_key, 0.0, case.causal and case.window is None),
        # There is no dropout, so its random state is never read.
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
        scale=case.scale,
        window_size_left=left,
        window_size_right=right,
    )


@cache
def _choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    heads_and_width: torch.Size,
    key_value_heads: int,
    causal: bool,
    sees_all: bool,
) -> None:
    """Have torch run the best kernel whose results are right for such heads, and for all that the
    process has had. Waits for the device, once for each kind of attention."""
    heads, width = heads_and_width
    capability = read_compute_capability(device)
    names = [name for name, takes in _CAPABILITIES.items() if capability in takes]
    if not names:
        return
    sizes = [heads, heads, key_value_heads, key_value_heads]
    with _disable_current_modes():  # activation checkpointing would keep these results
        generator = torch.Generator(device).manual_seed(0)
        sample = torch.randn(371, sum(sizes), width, generator=generator, device=device).to(dtype)
        parts = [part.contiguous() for part in sample.split(sizes, 1)]
        bounds = torch.tensor([0, 70, 371], dtype=torch.int32, device=device)
        case = FlashCase(bounds, 301, bounds, 301, causal, width**-0.5, None if sees_all else 99)
        _activate(None)
        wanted = _try_kernel(*parts, case)
        for name in names:
            try:
                _activate(name)
                pairs = zip(_try_kernel(*parts, case), wanted, strict=True)
                off = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
                if all(x <= _MAX_DIFFERENCE for x in off):
                    return
                why = f"its results differ from torch's by {off}"
            except Exception as error:  # it may not be installed, and compiles, which can fail
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
            _log.info("attention of %d heads of %d dims: not %s (%s)", heads, width, name, why)
            del _CAPABILITIES[name]
            _choose_kernel.cache_clear()  # the next one has to be right for what came before, too
        _activate(None)


def _activate(name: str | None) -> None:
    """Have torch run the kernel of this name; None: its own."""
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    if name is not None:
        from torch.nn.attention._fa4 import register_flash_attention_fa4

        ours = partial(register_flash_attention_fa4, __name__)
        attention.register_flash_attention_impl("FA4", register_fn=ours)
        attention.activate_flash_attention_impl(name)


def _try_kernel(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, case: FlashCase) -> list[Tensor]:
    out, lse = _forward(q, k, v, case)
    return [out, lse, *flash_backward(grad, q, k, v, out, lse, case)]


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention 4 as torch calls it. It takes two results; vLLM's gives four."""
    out, lse, *_ = import_module(FLASH_4)._flash_attn_fwd(*args, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return import_module(FLASH_4)._flash_attn_bwd(*args, **kwargs)

"""The elementwise parts of the output head as Triton kernels. Between the products that give logits
and those that take their gradient, each kernel goes over the logits once.

`hybridrl.models.log_probs` has the same in torch, as the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_COLUMNS_PER_STEP = 2048
_LOWEST = tl.constexpr(-1e30)
"""Less than any logit; unlike minus infinity it has differences."""


def sum_exponentials(
    products: torch.Tensor, temperature: float, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each token, and `[tokens, 2]`: with z the logits less the
    largest, the sums of exp(z) and of exp(z) z."""
    tokens, columns = products.shape
    largest, sums = products.new_empty(tokens), products.new_empty(tokens, 2)
    if tokens:
        _sum_exponentials[(tokens,)](
            *(products, largest, sums, columns, temperature, soft_cap or 1.0),
            **_constants(soft_cap),
        )
    return largest, sums


def differentiate_log_probs(
    products: torch.Tensor,
    dtype: torch.dtype,
    targets: torch.Tensor,
    of_tokens: Sequence[torch.Tensor],
    temperature: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Return the gradient of the products in this dtype; float32 takes their place.

    Args:
        targets: `[tokens]`, the column of each target; it may be none of these.
        of_tokens: float32 `[tokens]` each: the largest logit; the logarithm of the sum of
            exp(logit - largest); the entropy; the gradients of log-probability and entropy.
    """
    tokens, columns = products.shape
    gradient = products if dtype is products.dtype else torch.empty_like(products, dtype=dtype)
    if tokens:
        _differentiate[(tokens, triton.cdiv(columns, _COLUMNS_PER_STEP))](
            *(products, gradient, targets, *(x.contiguous() for x in of_tokens)),
            *(columns, temperature, soft_cap or 1.0),
            **_constants(soft_cap),
        )
    return gradient


def _constants(soft_cap: float | None) -> dict[str, int]:
    return {"CAPPED": soft_cap is not None, "STEP": _COLUMNS_PER_STEP}


@triton.jit
def _sum_exponentials(
    products,
    largest,
    sums,
    columns,
    temperature,
    soft_cap,
    CAPPED: tl.constexpr,  # noqa: N803 (Triton's way to write constants)
    STEP: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    # Each lane has sums of its own, less its own largest logit.
    best = tl.full([STEP], _LOWEST, tl.float32)
    total = tl.zeros([STEP], tl.float32)
    weighted = tl.zeros([STEP], tl.float32)
    for start in range(0, columns, STEP):
        at = start + tl.arange(0, STEP)
        product = tl.load(products + row * columns + at, mask=at < columns, other=0.0)
        logit, _ = _scaled(product, temperature, soft_cap, CAPPED)
        logit = tl.where(at < columns, logit, _LOWEST)
        higher = tl.maximum(best, logit)
        shift, z = best - higher, logit - higher
        kept, exponential = tl.exp(shift), tl.exp(z)
        weighted = kept * (weighted + shift * total) + exponential * z
        total = kept * total + exponential
        best = higher
    top = tl.max(best, 0)
    shift = best - top
    kept = tl.exp(shift)
    tl.store(largest + row, top)
    tl.store(sums + row * 2, tl.sum(kept * total, 0))
    tl.store(sums + row * 2 + 1, tl.sum(kept * (weighted + shift * total), 0))


@triton.jit
def _differentiate(
    products,
    gradient,
    targets,
    largest,
    log_sum,
    entropy,
    of_log_prob,
    of_entropy,
    columns,
    temperature,
    soft_cap,
    CAPPED: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    place = row * columns + at
    product = tl.load(products + place, mask=at < columns, other=0.0)
    logit, slope = _scaled(product, temperature, soft_cap, CAPPED)
    log_p = logit - tl.load(largest + row) - tl.load(log_sum + row)
    first, second = tl.load(of_log_prob + row), tl.load(of_entropy + row)
    # d log p_t / d z = onehot_t - p;  d H / d z = -p (log p + H)
    found = -tl.exp(log_p) * (first + second * (log_p + tl.load(entropy + row)))
    found += tl.where(at == tl.load(targets + row), first, 0.0)
    tl.store(gradient + place, (found * slope).to(gradient.dtype.element_ty), mask=at < columns)


@triton.jit
def _scaled(product, temperature, soft_cap, CAPPED: tl.constexpr):  # noqa: N803
    """Return the logits, and their derivatives by the products."""
    if CAPPED:
        decay = tl.exp(-2.0 * tl.abs(product) / soft_cap)
        tanh = tl.where(product < 0.0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)
        slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        return tanh * soft_cap / temperature, slope / temperature
    else:
        return product / temperature, 1.0 / temperature

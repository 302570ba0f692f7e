"""Mean, variance and whitening over the tokens under a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.masking import as_bool, as_float, on_mask


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of x over the mask, a scalar; 0 for an empty mask.

    x, mask: one shape, any number of dimensions. Differentiable in x.
    """
    (x,) = as_float(x)
    mask = as_bool(mask)
    return on_mask(x, mask).sum() / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """The variance of x over the mask, a scalar; 0 when the mask has fewer than two ones.

    Divides by n - 1 (by n when not ``unbiased``).
    """
    mask = as_bool(mask)
    centred = _centre(x, mask)
    count = mask.sum()
    return centred.square().sum() / (count - int(unbiased)).clamp(min=1)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the mask, 0 off it; the mean is added back when
    ``shift_mean`` is false.

    A mask with fewer than two ones gives 0 everywhere: there is no spread to measure.
    """
    mask = as_bool(mask)
    whitened = _centre(x, mask) / (masked_var(x, mask) + 1e-8).sqrt()
    if not shift_mean:
        whitened = whitened + masked_mean(x, mask)
    return on_mask(whitened, mask & (mask.sum() >= 2))


def divide_by_std(x: Tensor, mask: Tensor) -> Tensor:
    """x / standard deviation over the mask, 0 off it: the sign of the mean is kept, and the unit of
    x does not matter.

    Where the mean is more than ten standard deviations it is divided to be ten: of values that are
    all alike the deviation is only their rounding.
    """
    (x,) = as_float(x)
    std, mean = masked_var(x, mask).sqrt(), masked_mean(x, mask)
    divisor = torch.maximum(std, mean.abs() / 10.0)
    return on_mask(x, mask) / torch.where(divisor > 0, divisor, 1.0)


def _centre(x: Tensor, mask: Tensor) -> Tensor:
    """x minus its mean, 0 off the mask."""
    (x,) = as_float(x)
    centred = on_mask(on_mask(x, mask) - masked_mean(x, mask), mask)
    # The first mean is off by a rounding of x itself, which whitening a constant would blow up
    # by 1e4. The mean of what is left over is small, and so is its rounding.
    return on_mask(centred - masked_mean(centred, mask), mask)

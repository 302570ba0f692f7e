"""Entering a mask safely: values off the mask are replaced before any arithmetic touches them.

Multiplying by the mask afterwards would not do: ``nan * 0`` is NaN, and even where the forward
value is discarded, the gradient of an overflowed ``exp`` is NaN and leaks into the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridrl.errors import ConfigError, nearest


def as_float(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Brings tensors to one dtype: float32, or float64 if any of them has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def as_bool(mask: Tensor) -> Tensor:
    """The mask as bool; any non-zero entry counts as one."""
    return mask if mask.dtype == torch.bool else mask != 0


def on_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """x on the mask and exactly 0 off it, in value and in gradient. No mask leaves x as it is."""
    return x if mask is None else torch.where(as_bool(mask), x, 0.0)


def require_known(setting: str, value: str, known: Iterable[str]) -> None:
    """Refuses a name that is not among the known ones, and suggests the nearest."""
    names = list(known)
    if value not in names:
        listed = ", ".join(f"`{name}`" for name in names)
        raise ConfigError(
            f"`{setting}` is `{value}`, which is not known; expected one of {listed}."
            + nearest(value, names)
        )

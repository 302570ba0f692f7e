"""Rounding matrices to 8 bits while a model computes: a part at a time that stays in the caches,
because on a CPU memory is what rounding costs."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.models.row_quantization import INT8, LARGEST, SMALLEST_SCALE, Rows
from hybridrl.system.device_traits import values_at_a_time

PASSES = 4
"""Over the values, with something in memory after each."""
_generators: dict[torch.device, torch.Generator] = {}


@torch.no_grad()
def round_rows(x: Tensor, *, stochastic: bool = False) -> Rows:
    """Rounds ``[rows, columns]`` with a scale for each row, ``[rows, 1]`` float32. A row with a
    number that is not finite has such a scale, so that what comes of it is seen.

    Args:
        stochastic: Up with the probability that makes the mean right, else to nearest. All values
            of a column share a random number: each is uniform, and one for each element would take
            longer than a product.
    """
    values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(len(x), 1, device=x.device)
    chances = _chances(x) if stochastic else None
    largest = LARGEST[INT8] - 1 if stochastic else LARGEST[INT8]  # which may be rounded up
    some, memory = _memory(x)
    for into, part, its_scales in zip(
        values.split(some), x.split(some), scales.split(some), strict=True
    ):
        most = part.abs().amax(1, keepdim=True).float()
        torch.clamp_min(most / largest, SMALLEST_SCALE, out=its_scales)
        _round(part, its_scales.reciprocal(), chances, into, memory[: len(part)])
    return Rows(values, scales)


@torch.no_grad()
def round_columns(x: Tensor, weights: Tensor | None = None) -> Rows:
    """Rounds ``[rows, columns]`` to nearest with a scale for each column, ``[1, columns]``.

    Args:
        weights: ``[rows, 1]`` float32, which rows are multiplied with before.
    """
    some, memory = _memory(x)
    parts = list(x.split(some)) if len(x) else []
    factors = [None] * len(parts) if weights is None or not parts else weights.split(some)
    most = torch.zeros(x.shape[1], device=x.device)
    for part, factor in zip(parts, factors, strict=True):
        sizes = part.abs() if factor is None else part.abs().mul(factor)
        most = torch.maximum(most, sizes.amax(0).float())
    scales = (most / LARGEST[INT8]).clamp_min_(SMALLEST_SCALE)[None]
    values, inverse = torch.empty(x.shape, dtype=torch.int8, device=x.device), scales.reciprocal()
    for into, part, factor in zip(values.split(some), parts, factors, strict=False):
        if factor is not None:
            part = torch.mul(part, factor, out=memory[: len(part)])
        _round(part, inverse, None, into, memory[: len(part)])
    return Rows(values, scales)


def seed_rounding(device: torch.device, seed: int) -> None:
    """Has stochastic rounding on this device draw from this seed from now on."""
    _generators[device] = torch.Generator(device).manual_seed(seed)


def _chances(x: Tensor) -> Tensor:
    return torch.rand(x.shape[1], device=x.device, generator=_generators.get(x.device))


def _round(
    part: Tensor, inverse: Tensor, chances: Tensor | None, into: Tensor, memory: Tensor
) -> None:
    if chances is None:
        torch.mul(part, inverse, out=memory).round_()
    else:
        torch.addcmul(chances, part.float(), inverse, out=memory).floor_()
    into.copy_(memory)


def _memory(x: Tensor) -> tuple[int, Tensor]:
    """How many rows to round at a time, and float32 memory for them."""
    some = max(1, values_at_a_time(x.device.type) // PASSES // max(1, x.shape[1]))
    return some, torch.empty(min(some, len(x)), x.shape[1], device=x.device)

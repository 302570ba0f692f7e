"""Weights of linear layers in 8 bits: how they are rounded when they come to a generator.

Each row, which makes one output, has a scale of its own, so that one large weight spoils one row
only (Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339, section 2.2: row-wise quantisation).
Inputs are rounded by the kernels, token by token. The products are summed in 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.system.device_traits import values_per_chunk

NONE = "none"
INT8, FP8 = "int8", "fp8"
TYPES = {INT8: torch.int8, FP8: torch.float8_e4m3fn}
LARGEST = {INT8: 127.0, FP8: 448.0}
"""int8 is symmetric: -128 is not used."""
AT_A_TIME = 2**24
"""Elements that are in float32 while they are rounded."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows that are all zero."""


class Rows(NamedTuple):
    """A matrix in 8 bits that stands for ``values * scales``. ``values * scales`` is what is meant.

    Attributes:
        values: ``[outputs, inputs]``, int8 or float8_e4m3fn.
        scales: ``[outputs, 1]``, float32.
    """

    values: Tensor
    scales: Tensor


def quantize_rows(weight: Tensor, kind: str) -> Rows:
    """Round ``[outputs, inputs]`` of any dtype to the nearest values of `kind`, `int8` or `fp8`.
    The largest of a row is exact but for rounding of the scale; a row with a number that is not
    finite has such a scale, so it stays as wrong as it was."""
    largest = LARGEST[kind]
    # amax and abs are exact in any precision.
    scales = (weight.abs().amax(1, keepdim=True).float() / largest).clamp_min(SMALLEST_SCALE)
    values = torch.empty(weight.shape, dtype=TYPES[kind], device=weight.device)
    some = max(1, AT_A_TIME // weight.shape[1])
    for into, part, scale in zip(
        values.split(some), weight.split(some), scales.split(some), strict=True
    ):
        scaled = part.float() / scale
        if kind == INT8:
            scaled = scaled.round_()
        into.copy_(scaled.clamp_(-largest, largest))
    return Rows(values, scales)


def dequantize_rows(rows: Rows) -> Tensor:
    """Return ``values * scales`` in float32."""
    return rows.values.float() * rows.scales


PASSES = 4
"""Over the values, with something in memory after each."""
_generators: dict[torch.device, torch.Generator] = {}


@torch.no_grad()
def quantize_rows_int8(x: Tensor, *, stochastic: bool = False) -> Rows:
    """Round ``[rows, columns]`` to int8 with a scale for each row, ``[rows, 1]`` float32. A row
    with a number that is not finite has such a scale, so that what comes of it is seen.

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
def quantize_columns_int8(x: Tensor, weights: Tensor | None = None) -> Rows:
    """Round ``[rows, columns]`` to nearest int8 with a scale for each column, ``[1, columns]``.

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
    """Return how many rows to round at a time, so few that they stay in the caches, and float32
    memory for them."""
    some = max(1, values_per_chunk(x.device.type) // PASSES // max(1, x.shape[1]))
    return some, torch.empty(min(some, len(x)), x.shape[1], device=x.device)

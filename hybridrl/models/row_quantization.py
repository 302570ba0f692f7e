"""Weights of linear layers in 8 bits: how they are rounded when they come to a generator.

Each row, which makes one output, has a scale of its own, so that one large weight spoils one row
only (Dettmers et al. 2022, "LLM.int8()", arXiv:2208.07339, section 2.2: row-wise quantisation).
Inputs are rounded by the kernels, token by token. The products are summed in 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """A matrix in 8 bits: ``values * scales`` is what is meant.

    Attributes:
        values: ``[outputs, inputs]``, int8 or float8_e4m3fn.
        scales: ``[outputs, 1]``, float32.
    """

    values: Tensor
    scales: Tensor


def quantise(weight: Tensor, kind: str) -> Rows:
    """Rounds a matrix ``[outputs, inputs]`` of any precision to the nearest values of `kind`,
    `int8` or `fp8`. The largest of a row is exact but for rounding of the scale; a row with a
    number that is not finite has such a scale, so it stays as wrong as it was."""
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


def dequantise(rows: Rows) -> Tensor:
    """What the numbers mean, in float32."""
    return rows.values.float() * rows.scales

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
    whole = weight.float()
    scales = (whole.abs().amax(1, keepdim=True) / LARGEST[kind]).clamp_min(SMALLEST_SCALE)
    scaled = whole / scales
    if kind == INT8:
        scaled = scaled.round_()
    return Rows(scaled.clamp_(-LARGEST[kind], LARGEST[kind]).to(TYPES[kind]), scales)


def dequantise(rows: Rows) -> Tensor:
    """What the numbers mean, in float32."""
    return rows.values.float() * rows.scales

"""Optimizer moments in 8 bits: block-wise dynamic quantization (Dettmers et al. 2021,
arXiv:2110.02861, sections 2.1 and 2.2).

A block is at most `BLOCK` neighbours of a row of a matrix, so that a cut between rows does not
change it. The largest of its numbers is kept in float32, and of each the nearest of 256 shares of
it, which lie close together near 0. Decoded numbers have the same codes again.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Numbers of a row that share a scale."""
_DECADES = 7


class BlockCodes(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        codes: uint8, of the shape of the matrix.
        scales: float32 `[rows, blocks of a row]`, the number of each block that is furthest from 0.
        signed: Whether its numbers may be below 0.
    """

    codes: Tensor
    scales: Tensor
    signed: bool

    def to(self, device: torch.device) -> BlockCodes:
        """Copy to a device without waiting."""
        return BlockCodes(
            self.codes.to(device, non_blocking=True),
            self.scales.to(device, non_blocking=True),
            self.signed,
        )

    def decode(self) -> Tensor:
        """Return the matrix in float32."""
        shares = dynamic_shares(self.signed).to(self.codes.device)[self.codes.int()]
        return (
            (_blocks(shares) * self.scales[..., None])
            .flatten(1)[:, : self.codes.shape[-1]]
            .reshape(self.codes.shape)
        )


def encode_blocks(values: Tensor, signed: bool) -> BlockCodes:
    """Encode a float32 matrix, or several in one tensor. What is above 0 stays above 0, so that no
    second moment vanishes beside a larger one of its block."""
    blocks = _blocks(values)
    furthest = blocks.abs().argmax(-1, keepdim=True)
    scales = blocks.gather(-1, furthest)
    units = torch.where(scales == 0, 0.0, blocks / scales)
    shares = dynamic_shares(signed).to(values.device)
    codes = torch.bucketize(units, (shares[1:] + shares[:-1]) / 2, out_int32=True)
    if not signed:
        codes = torch.maximum(codes, (units > 0).int())
    codes = codes.to(torch.uint8).flatten(1)[:, : values.shape[-1]].reshape(values.shape)
    return BlockCodes(codes.contiguous(), scales.squeeze(-1), signed)


@cache
def dynamic_shares(signed: bool) -> Tensor:
    """Return the 256 shares in ascending order: 0, 1, and in each of seven decades the middles of
    equal parts, twice as many as in the decade below; with their negatives if `signed`."""
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - _DECADES + 1)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values.float()


def _blocks(values: Tensor) -> Tensor:
    """Return the rows of a tensor cut into blocks, the last one of a row filled up with zeros,
    `[rows, blocks, BLOCK]`; shorter rows are a block each."""
    width = values.shape[-1]
    block = max(1, min(BLOCK, width))
    count = -(-width // block)
    rows = values.numel() // width if width else 0
    return F.pad(values.reshape(rows, width), (0, count * block - width)).view(rows, count, block)

"""Symmetric integers of 8 or 4 bits with a scale for each group."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from hybridrl.compress.group_codec import GroupCodec
from hybridrl.errors import ConfigError


@dataclass(frozen=True)
class GroupedIntegers(GroupCodec):
    """Each value as round(x / scale), to nearest and then to even, in -127..127 or -7..7, where
    scale = max |x| / 127 or / 7 of its group. Source: SDP4Bit, arXiv 2410.15526.

    The error of a value is at most half its group's scale (and a rounding of float32): 0.4% or
    7.1% of the group's largest magnitude. Two integers of 4 bits share a byte, the first in its
    lower half, in two's complement.

    Args:
        bits: 8 or 4.
        group: Values that share a scale: a power of two from 32 to 8192.
        hadamard: Mix each 32 values before rounding and undo it after (see `mix`; the last
            `numel % 32` values are only scaled). It helps where few values are far larger than
            their neighbours. The norm of 32 errors is then at most 16 scales of what is mixed.

    Raises:
        ConfigError: if `bits` or `group` is something else.
    """

    bits: int = 4
    group: int = 2048
    hadamard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ConfigError(f"There is no codec of integers of {self.bits} bits: take 4 or 8.")

    @property
    def largest(self) -> float:
        """127 or 7."""
        return float(2 ** (self.bits - 1) - 1)

    def _to_codes(self, values: torch.Tensor) -> torch.Tensor:
        integers = values.round().to(torch.int8)
        return integers.view(torch.uint8) if self.bits == 8 else pack_halves(integers)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes.view(torch.int8) if self.bits == 8 else unpack_halves(codes)).float()


FIRST = 0 if sys.byteorder == "little" else 8
"""Where the first of two neighbouring bytes lies in their 16 bits."""


def pack_halves(integers: torch.Tensor) -> torch.Tensor:
    """Int8 in -8..7, an even number of them, as half as many bytes; the first of two is in the
    lower half."""
    pairs = integers.view(torch.int16)
    return (((pairs >> FIRST) & 0xF) | (((pairs >> (8 - FIRST)) & 0xF) << 4)).to(torch.uint8)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """Twice as many int8 as there are bytes."""
    pairs = packed.to(torch.int16)
    both = ((pairs & 0xF) << FIRST) | ((pairs >> 4) << (8 - FIRST))
    # In two's complement of four bits, 8..15 stand for -8..-1.
    return both.view(torch.int8).bitwise_xor_(8).sub_(8)

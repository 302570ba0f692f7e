"""Eight-bit floating point numbers with a scale for each group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from hybridrl.compress.group_codec import GroupCodec


@dataclass(frozen=True)
class GroupedFloat8(GroupCodec):
    """Each value as x / scale in float8 e4m3 (torch's `float8_e4m3fn`), rounded to nearest and then
    to even, where scale = max |x| / 448 of its group. Source: Micikevicius et al., FP8 formats for
    deep learning, arXiv 2209.05433; scales by block as in DeepSeek-V3, arXiv 2412.19437.

    The error of a value is at most 1/16 of it, or scale / 1024 if that is more.

    Args:
        group: Values that share a scale: a power of two from 32 to 8192.

    Raises:
        ConfigError: if `group` is something else.
    """

    group: int = 128

    bits: ClassVar[int] = 8
    floating: ClassVar[bool] = True
    hadamard: ClassVar[bool] = False

    @property
    def largest(self) -> float:
        """448."""
        return torch.finfo(torch.float8_e4m3fn).max

    def _to_codes(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float8_e4m3fn).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return all_codes(codes.device).index_select(0, codes.int())


@cache
def all_codes(device: torch.device) -> torch.Tensor:
    """What the 256 codes stand for: to look a code up takes a third of torch's conversion."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).float()

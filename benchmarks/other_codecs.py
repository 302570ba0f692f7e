"""Codecs that no setting of the product reaches, for comparisons: the largest values, what was lost
given back later, and floats of eight bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from hybridrl.compress.grouped_integers import (
    allocate_encoded,
    check_encoded,
    flatten_values,
    in_groups,
    in_units_of_scales,
    view_as_float32,
)
from hybridrl.errors import CodecError, ConfigError


@runtime_checkable
class Codec(Protocol):
    """What codecs that are compared have in common; see `GroupedIntegerCodec`."""

    def size(self, numel: int) -> int: ...

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor: ...


MOST_VALUES = 2**31 - 1


@dataclass(frozen=True)
class TopK:
    """A share of the values, those of the largest magnitude, exact; the others decode to zero.
    Source: Lin et al., Deep gradient compression, arXiv 1712.01887.

    What is left out has to come later: see `ErrorFeedback`. The bytes are the positions (int32, in
    rising order), then the values (float32). Infinities are the largest values and a NaN is larger
    still, so both are seen.

    Args:
        share: Of all values, above 0 and at most 1; at least one value is kept.

    Raises:
        ConfigError: if `share` is something else.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"A codec cannot keep a share of {self.share} of the values: `share` must be above "
                "0 and at most 1, such as 0.01."
            )

    def kept(self, numel: int) -> int:
        """How many of so many values are kept."""
        return math.ceil(self.share * numel)

    def size(self, numel: int) -> int:
        """The exact number of bytes of so many values.

        Raises:
            CodecError: if there are more than int32 can number.
        """
        if numel > MOST_VALUES:
            raise CodecError(
                f"{self} numbers values with 31 bits and was given {numel} at once: encode parts "
                f"of at most {MOST_VALUES}."
            )
        return 8 * self.kept(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Codec.encode`."""
        flat, out = flatten_values(values), allocate_encoded(self, values, out)
        largest = flat.abs().topk(self.kept(len(flat)), sorted=False).indices
        positions = largest.sort().values
        half = len(out) // 2
        out[:half] = positions.int().view(torch.uint8)
        out[half:] = flat[positions].float().view(torch.uint8)
        return out

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        check_encoded(self, encoded, numel, dtype)
        positions, values = view_as_float32(encoded).view(2, -1)
        flat = torch.zeros(numel, dtype=dtype, device=encoded.device)
        flat[positions.view(torch.int32).long()] = values.to(dtype)
        return flat


class ErrorFeedback:
    """Adds what encoding lost last time to what is encoded now, so that over many steps the sum of
    what arrives keeps to the sum of what was given. Source: Karimireddy et al., Error feedback
    fixes SignSGD, arXiv 1901.09847.

    One of these belongs to one tensor on one sender; the receiver decodes with the codec alone.
    After a tensor with an infinity or a NaN it begins anew: what was lost then is no number.

    Args:
        codec: Any codec.

    Attributes:
        lost: Float32, flat: what has not been sent yet; None before the first tensor. It takes four
            bytes for each value, and belongs in a checkpoint with the optimizer's state.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.lost: torch.Tensor | None = None

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of these values and of what was lost before (see `Codec.encode`).

        Raises:
            CodecError: if the tensor before had another number of values.
        """
        wanted = flatten_values(values).float()
        if self.lost is not None:
            if len(self.lost) != len(wanted):
                raise CodecError(
                    f"Error feedback of a tensor of {len(self.lost)} values was given one of "
                    f"{len(wanted)}: each tensor needs its own."
                )
            wanted = wanted + self.lost
        encoded = self.codec.encode(wanted, out)
        lost = wanted - self.codec.decode(encoded, len(wanted), torch.float32)
        self.lost = torch.where(lost.isfinite(), lost, 0)
        return encoded


@dataclass(frozen=True)
class GroupedFloat8:
    """Each value as x / scale in float8 e4m3 (torch's `float8_e4m3fn`), rounded to nearest and then
    to even, where scale = max |x| / 448 of its group. Source: Micikevicius et al., FP8 formats for
    deep learning, arXiv 2209.05433; scales by block as in DeepSeek-V3, arXiv 2412.19437.

    The error of a value is at most 1/16 of it, or scale / 1024 if that is more.
    """

    group: int = 128

    def size(self, numel: int) -> int:
        """The exact number of bytes of so many values."""
        return 4 * -(-numel // self.group) + numel

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Codec.encode`."""
        flat, out = flatten_values(values), allocate_encoded(self, values, out)
        scales = torch.empty(-(-flat.numel() // self.group), device=flat.device)
        largest = torch.finfo(torch.float8_e4m3fn).max
        units = in_units_of_scales(in_groups(flat.float(), self.group), largest, scales)
        out[: scales.nbytes] = scales.view(torch.uint8)
        out[scales.nbytes :] = units.view(-1)[: len(flat)].to(torch.float8_e4m3fn).view(torch.uint8)
        return out

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        check_encoded(self, encoded, numel, dtype)
        codes = encoded[self.size(numel) - numel :].view(torch.float8_e4m3fn).float()
        scales = view_as_float32(encoded[: self.size(numel) - numel])
        return (in_groups(codes, self.group) * scales[:, None]).view(-1)[:numel].to(dtype)

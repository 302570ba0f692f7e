"""Symmetric integers of 8 or 4 bits with a scale for each group: their bytes, and the way there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridrl.compress.hadamard import apply_hadamard, invert_hadamard
from hybridrl.errors import CodecError, ConfigError
from hybridrl.system.device_traits import has_triton, values_per_chunk

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Groups with a smaller scale are zeros: below it float32 loses digits, and some devices round to
zero."""
SMALLEST_GROUP, LARGEST_GROUP = 32, 8192


@dataclass(frozen=True)
class GroupedIntegerCodec:
    """A codec to symmetric integers: round(x / scale), to nearest with ties to even, in -127..127
    or -7..7, where scale = max |x| / 127 or / 7 of its group. Source: SDP4Bit, arXiv 2410.15526.

    The bytes are the scales of all groups, float32, then the codes. The last group may be short. A
    group with an infinity or a NaN decodes to NaN throughout, so that what goes wrong is seen where
    the values go. A group whose scale would be below 1.2e-38 decodes to zeros.

    The error of a value is at most half its group's scale (and a rounding of float32): 0.4% or
    7.1% of the group's largest magnitude. Two integers of 4 bits share a byte, the first in its
    lower half, in two's complement.

    Sender and receiver make equal codecs and know how many values travel; the bytes carry nothing
    but them. The same bytes decode to the same bits on every device, so a sender that decodes what
    it sends knows what the receiver has.

    Args:
        bits: 8 or 4.
        group: Values that share a scale: a power of two from 32 to 8192.
        hadamard: Mix each 32 values before rounding and undo it after (see `apply_hadamard`; the
            last `numel % 32` values are only scaled). It helps where few values are far larger than
            their neighbours. The norm of 32 errors is then at most 16 scales of what is mixed.

    Raises:
        ConfigError: if `bits` or `group` is something else.
    """

    bits: int = 4
    group: int = 2048
    hadamard: bool = False

    def __post_init__(self) -> None:
        power_of_two = self.group > 0 and self.group.bit_count() == 1
        if not (power_of_two and SMALLEST_GROUP <= self.group <= LARGEST_GROUP):
            raise ConfigError(
                f"{self.group} values cannot share a scale: `group` must be a power of two from "
                f"{SMALLEST_GROUP} to {LARGEST_GROUP}, such as 128 or 2048."
            )
        if self.bits not in (4, 8):
            raise ConfigError(f"There is no codec of integers of {self.bits} bits: take 4 or 8.")

    @property
    def largest(self) -> float:
        """The largest code: 127 or 7."""
        return float(2 ** (self.bits - 1) - 1)

    def size(self, numel: int) -> int:
        """Return the exact number of bytes of `numel` values; 0 for none."""
        return 4 * self._groups(numel) + -(-numel * self.bits // 8)

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Encode these values.

        Args:
            values: Contiguous, of any shape, read as flat: float32, bfloat16 or float16.
            out: Memory for the bytes: uint8, contiguous, of `size(values.numel())` elements, on the
                device of the values. It may begin at any byte of a larger buffer.

        Returns:
            `out`, or new memory like it.

        Raises:
            CodecError: if values or memory are not as described.
        """
        flat, out = flatten_values(values), allocate_encoded(self, values, out)
        scales = torch.empty(self._groups(flat.numel()), device=flat.device)
        codes = out[4 * len(scales) :]
        if has_triton(flat.device.type):
            from hybridrl.compress.group_kernels import encode_groups

            encode_groups(flat, scales, codes, self.largest, **self.kind())
        else:
            self._encode(flat, scales, codes)
        out[: 4 * len(scales)] = scales.view(torch.uint8)
        return out

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Decode bytes into values.

        Args:
            encoded: As `encode` returned them.
            numel: The number of values.
            dtype: Of the result. Values are computed in float32 and then rounded to it.

        Returns:
            A new flat tensor of `numel` values on the device of the bytes.

        Raises:
            CodecError: if these are not as many bytes as so many values have.
        """
        check_encoded(self, encoded, numel, dtype)
        scales = view_as_float32(encoded[: 4 * self._groups(numel)])
        codes = encoded[4 * len(scales) :]
        flat = torch.empty(numel, dtype=dtype, device=encoded.device)
        if has_triton(flat.device.type):
            from hybridrl.compress.group_kernels import decode_groups

            decode_groups(flat, scales, codes, **self.kind())
        else:
            self._decode(flat, scales, codes)
        return flat

    def kind(self) -> dict[str, int]:
        """Return the constants that a kernel is compiled for."""
        return {"GROUP": self.group, "BITS": self.bits, "MIX": self.hadamard}

    def _groups(self, numel: int) -> int:
        return -(-numel // self.group)

    def _encode(self, flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """The reference, whose bits every kernel gives: fills `scales` and `codes`."""
        for values, its_scales, its_codes in self._parts(flat, scales, codes):
            wanted = values.float()
            blocks = in_groups(apply_hadamard(wanted) if self.hadamard else wanted, self.group)
            units = in_units_of_scales(blocks, self.largest, its_scales)
            integers = units.view(-1).round().to(torch.int8)
            packed = integers.view(torch.uint8) if self.bits == 8 else pack_int4(integers)
            its_codes.copy_(packed[: len(its_codes)])

    def _decode(self, flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """The reference, whose bits every kernel gives: fills `flat`."""
        for values, its_scales, its_codes in self._parts(flat, scales, codes):
            integers = its_codes.view(torch.int8) if self.bits == 8 else unpack_int4(its_codes)
            units = integers[: len(values)].float()
            blocks = in_groups(invert_hadamard(units) if self.hadamard else units, self.group)
            blocks = blocks * its_scales[:, None]
            values.copy_(blocks.view(-1)[: len(values)])

    def _parts(
        self, flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Whole groups of all three, as many as a cache holds at a time."""
        groups = max(1, values_per_chunk(flat.device.type) // self.group)
        for at in range(0, len(scales), groups):
            first, last = at * self.group, (at + groups) * self.group
            part = slice(first * self.bits // 8, last * self.bits // 8)
            yield flat[first:last], scales[at : at + groups], codes[part]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The number formats that codecs take and give."""


def flatten_values(values: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the values without their gradient.

    Raises:
        CodecError: if codecs do not know such numbers, or they do not lie one after another.
    """
    if values.dtype not in DTYPES:
        raise CodecError(
            f"A codec was given values of {values.dtype}; it takes float32, bfloat16 and float16."
        )
    if not values.is_contiguous():
        raise CodecError(
            f"A codec was given a tensor of shape {tuple(values.shape)} and strides "
            f"{values.stride()}; it takes contiguous ones: call `contiguous()`."
        )
    return values.detach().view(-1)


def allocate_encoded(
    codec: GroupedIntegerCodec, values: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Return `out`, or new memory for the encoded bytes of these values.

    Raises:
        CodecError: if `out` is not of the right size, kind or device.
    """
    size = codec.size(values.numel())
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=values.device)
    fits = out.shape == (size,) and out.dtype is torch.uint8 and out.is_contiguous()
    if not fits or out.device != values.device:
        raise CodecError(
            f"{codec} was given {tuple(out.shape)} elements of {out.dtype} on {out.device} for the "
            f"bytes of {values.numel()} values; it needs {size} of uint8 on {values.device}."
        )
    return out


def check_encoded(
    codec: GroupedIntegerCodec, encoded: torch.Tensor, numel: int, dtype: torch.dtype
) -> None:
    """Check that the encoded bytes have the size that `numel` values take.

    Raises:
        CodecError: if not, or if values of this dtype are not what codecs give.
    """
    size = codec.size(numel)
    if encoded.shape != (size,) or encoded.dtype is not torch.uint8:
        raise CodecError(
            f"{codec} was given {tuple(encoded.shape)} elements of {encoded.dtype} to decode "
            f"{numel} values; they take {size} of uint8. Sender and receiver must agree on codec "
            "and number of values."
        )
    if dtype not in DTYPES:
        raise CodecError(
            f"{codec} was asked to decode to {dtype}; it gives float32, bfloat16 and float16."
        )


def view_as_float32(part: torch.Tensor) -> torch.Tensor:
    """Return bytes as float32 numbers: a view where they are aligned, a copy otherwise."""
    aligned = part.data_ptr() % 4 == 0 and part.storage_offset() % 4 == 0
    return (part if aligned else part.clone()).view(torch.float32)


def in_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """Reshape flat values to `[groups, group]`, padded with zeros."""
    missing = -len(values) % group
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, group)


def in_units_of_scales(blocks: torch.Tensor, largest: float, scales: torch.Tensor) -> torch.Tensor:
    """Divide float32 values `[groups, group]` by the scales of their groups; the results are finite
    and at most `largest`.

    Args:
        scales: Memory for the scales.
    """
    torch.div(blocks.abs().amax(1), largest, out=scales)
    scales.masked_fill_(scales < SMALLEST_SCALE, 0)
    units = blocks / scales.masked_fill(scales == 0, float("inf"))[:, None]
    scales.masked_fill_(scales.isinf(), float("nan"))
    # The scale says it all of a group that is not finite. Its codes are zeros on every device; so
    # rarely that looking for such groups costs less than to write over all.
    units[scales.isnan()] = 0
    return units


_FIRST_BYTE_SHIFT = 0 if sys.byteorder == "little" else 8
"""Where the first of two neighbouring bytes lies in their 16 bits."""


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack an even number of int8 values in -8..7 into half as many bytes; the first of two is in
    the lower half."""
    pairs = integers.view(torch.int16)
    return (
        ((pairs >> _FIRST_BYTE_SHIFT) & 0xF) | (((pairs >> (8 - _FIRST_BYTE_SHIFT)) & 0xF) << 4)
    ).to(torch.uint8)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack each byte into two int8 values."""
    pairs = packed.to(torch.int16)
    both = ((pairs & 0xF) << _FIRST_BYTE_SHIFT) | ((pairs >> 4) << (8 - _FIRST_BYTE_SHIFT))
    # In two's complement of four bits, 8..15 stand for -8..-1.
    return both.view(torch.int8).bitwise_xor_(8).sub_(8)

"""The interface of all codecs: values of a flat tensor to bytes and back."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from hybridrl.errors import CodecError


@runtime_checkable
class Codec(Protocol):
    """A codec that turns the values of a flat tensor into bytes of a size known in advance.

    Sender and receiver make equal codecs (frozen dataclasses, which can be pickled and compared)
    and know how many values travel; the bytes carry nothing but them. The same bytes decode to the
    same bits on every device, so a sender that decodes what it sends knows what the receiver has.

    A codec has no state. What the receiver has already (`new - held` is encoded) is the caller's.
    """

    def size(self, numel: int) -> int:
        """Return the exact number of bytes of `numel` values; 0 for none."""
        ...

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
        ...

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
        ...


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def allocate_encoded(codec: Codec, values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
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


def check_encoded(codec: Codec, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
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

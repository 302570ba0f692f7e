"""What all codecs have in common: values of a flat tensor to bytes and back."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Codec(Protocol):
    """Bytes for the values of a flat tensor, as many whatever the values are.

    Sender and receiver make equal codecs (frozen dataclasses, which can be pickled and compared)
    and know how many values travel; the bytes carry nothing but them. The same bytes decode to the
    same bits on every device, so a sender that decodes what it sends knows what the receiver has.

    A codec has no state. What the receiver has already (`new - held` is encoded) is the caller's.
    """

    def size(self, numel: int) -> int:
        """The exact number of bytes of so many values; 0 for none."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of these values.

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
        """The values that bytes stand for.

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

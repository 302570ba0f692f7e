"""Messages of weights to ranks that hold earlier ones: by which method, against what, how checked.

Sender and receivers of a message each keep a *record* of it: the values that the receivers hold
since its last version, bit for bit. Differences are taken against the record. Records lie in the
host's memory: the device's is for models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.compress import sparse_delta

FULL, DELTA = METHODS = ("full", "delta")
WORDS_AT_A_TIME = 1 << 16
"""Of a checksum, so that what is multiplied stays in a processor's cache."""
NO_VERSION = 0


class Header(NamedTuple):
    """What a receiver has to know of a message.

    Attributes:
        method: Number in `METHODS`.
        size: Bytes that follow.
        base: The version that a difference is to; `NO_VERSION` for values themselves.
        version: Of the values, from 1.
        checksum: Of the values that the receivers are to have.
    """

    method: int
    size: int
    base: int
    version: int
    checksum: int


class Message(NamedTuple):
    """What travels, and of how many values it is a change (None: the record had none)."""

    header: Header
    data: Tensor
    changed: int | None = None


class DamagedMessageError(ValueError):
    """Values that are not those that were sent, or a difference to others than the receiver has."""


class Record:
    """What the receivers of one message hold. Of each end."""

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self.version = NO_VERSION

    @property
    def nbytes(self) -> int:
        """Of the host's memory."""
        return 0 if self._values is None else self._values.nbytes

    @property
    def values(self) -> Tensor | None:
        """As in the last version; None: there is none that was kept."""
        return self._values

    def forget(self) -> None:
        """Gives the memory back; the next message is no difference."""
        self._values, self.version = None, NO_VERSION

    def encode(self, values: Tensor, method: str, version: int) -> Message:
        """The message that brings the receivers to `values`, and notes that they hold them then.
        Without an earlier version it is `full`.

        Args:
            values: Flat and contiguous, of the generator's precision.
        """
        base, changed = self.version, None
        if method == FULL or self._values is None:
            base, data = NO_VERSION, values.view(torch.uint8)
        else:
            data = sparse_delta.encode(self._values.to(values.device), values)
            changed = sparse_delta.changed_of(data, len(values))
        self._keep(values, version)
        number = METHODS.index(FULL if base == NO_VERSION else method)
        header = Header(number, len(data), base, version, checksum(values))
        return Message(header, data, changed)

    def whole(self) -> Message:
        """What the receivers are to hold, as it is: for one that could not use the last message."""
        data = self._values.view(torch.uint8)
        check = checksum(self._values)
        return Message(Header(0, len(data), NO_VERSION, self.version, check), data)

    def decode(self, message: Message, numel: int, dtype: torch.dtype) -> Tensor:
        """The values that the sender meant, on the device of the message.

        Raises:
            DamagedMessageError: if they are not there to be had. The record stays as it was.
        """
        header, data = message.header, message.data
        is_whole = METHODS[header.method] == FULL
        if not is_whole and (self._values is None or header.base != self.version):
            raise DamagedMessageError(
                f"It is a difference to version {header.base}, where {self.version} is held."
            )
        if is_whole:
            if len(data) != numel * dtype.itemsize:
                raise DamagedMessageError(f"{len(data)} bytes are not {numel} values.")
            values = data.clone().view(dtype)  # aligned, and the caller's
        else:
            try:
                values = sparse_delta.decode(data, self._values.to(data.device))
            except ValueError as error:
                raise DamagedMessageError(str(error)) from error
        if checksum(values) != header.checksum:
            raise DamagedMessageError(f"The checksum of version {header.version} is another.")
        self._keep(values, header.version)
        return values

    def _keep(self, values: Tensor, version: int) -> None:
        if self._values is None or len(self._values) != len(values):
            self._values = torch.empty(len(values), dtype=values.dtype)
        self._values.copy_(values)
        self.version = version


def checksum(values: Tensor) -> int:
    """64 bits of the values' bits, equal on all devices. Each word of 8 bytes counts times an odd
    number of its own, so no change of a single word is missed, and no two words trade places
    unseen."""
    raw = values.view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    found = torch.zeros((), dtype=torch.int64, device=raw.device)
    for number, part in enumerate(words.split(WORDS_AT_A_TIME)):
        first = number * WORDS_AT_A_TIME
        times = torch.arange(first, first + len(part), device=raw.device) * 2 + 1
        found += (part * times).sum()  # wraps, everywhere alike
    return int(found)

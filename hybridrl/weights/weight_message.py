"""Messages that bring weights to ranks which hold earlier ones: full values or differences, with
checksums.

Sender and receivers of a message each keep a *record* of it: the values that the receivers hold
since its last version, bit for bit. Differences are taken against the record, and not against the
values that the sender had at that time: what a lossy method leaves out comes with a later version,
and errors never add up (quantised weight differences of Jia et al., "SDP4Bit", NeurIPS 2024,
arXiv:2410.15526). Records lie in the host's memory: the device's is for models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.compress.grouped_integers import GroupedIntegerCodec
from hybridrl.weights import sparse_delta

FULL_SYNC, DELTA_SYNC, INT8_SYNC, INT4_DELTA_SYNC = SYNC_METHODS = (
    "full",
    "delta",
    "int8",
    "int4_delta",
)
_INT8, _INT4 = GroupedIntegerCodec(bits=8, group=128), GroupedIntegerCodec(bits=4, group=512)
"""1.94 and 3.94 times fewer bytes than bfloat16."""
_CHECKSUM_WORDS = 1 << 16
"""Of a checksum, so that what is multiplied stays in a processor's cache."""
NO_VERSION = 0


class MessageHeader(NamedTuple):
    """The header of a message: its method, size, versions and checksum.

    Attributes:
        method: Number in `SYNC_METHODS`.
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


class WeightMessage(NamedTuple):
    """A message of weights, with the number of values that it changes (None if there was no
    record)."""

    header: MessageHeader
    data: Tensor
    changed: int | None = None


class DamagedMessageError(ValueError):
    """A message that differs from what was sent, or a difference to a version that the receiver
    does not hold."""


class WeightRecord:
    """A record of the values that the receivers of one message hold, kept at both ends.

    Attributes:
        values: Of the last version; None if none are kept.
        version: Its number.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.version = NO_VERSION

    @property
    def nbytes(self) -> int:
        """The bytes of host memory in use."""
        return 0 if self.values is None else self.values.nbytes

    def forget(self) -> None:
        """Release the memory, so that the next message is not a difference."""
        self.values, self.version = None, NO_VERSION

    def encode(self, values: Tensor, method: str, version: int) -> WeightMessage:
        """Encode the message that brings the receivers to `values`, or as near as the method comes,
        and record what they hold then. A difference without a record is sent as `full`, and so are
        values that are not finite, which integers cannot represent.

        Args:
            values: Flat and contiguous, of the generator's precision.
        """
        held = None if self.values is None else self.values.to(values.device)
        if method in (INT8_SYNC, INT4_DELTA_SYNC) and not _is_finite(values, held):
            method = FULL_SYNC
        after, base, changed = values, NO_VERSION, None
        if method == INT8_SYNC:
            data = _INT8.encode(values)
            after = _INT8.decode(data, len(values), values.dtype)
        elif method == FULL_SYNC or held is None:
            method, data = FULL_SYNC, values.view(torch.uint8)
        else:
            if method == DELTA_SYNC:
                data = sparse_delta.encode_sparse_delta(held, values)
            else:
                data = _INT4.encode(values.float() - held.float())
                after = _apply_int4_difference(held, data)
            base, changed = self.version, _count_changed(held, after)
        self._keep(after, version)
        header = MessageHeader(
            SYNC_METHODS.index(method), len(data), base, version, compute_checksum(after)
        )
        return WeightMessage(header, data, changed)

    def whole(self) -> WeightMessage:
        """Return the receivers' values in full, for one that could not decode the last message."""
        assert self.values is not None, "a message was encoded"
        data, check = self.values.view(torch.uint8), compute_checksum(self.values)
        method = SYNC_METHODS.index(FULL_SYNC)
        return WeightMessage(
            MessageHeader(method, len(data), NO_VERSION, self.version, check), data
        )

    def decode(self, message: WeightMessage, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the values of a message, on its device.

        Raises:
            DamagedMessageError: if they are not there to be had. The record stays as it was.
        """
        header, data = message.header, message.data
        if not 0 <= header.method < len(SYNC_METHODS):
            raise DamagedMessageError(f"There is no method {header.method}.")
        method = SYNC_METHODS[header.method]
        if method in (DELTA_SYNC, INT4_DELTA_SYNC):
            if self.values is None or header.base != self.version:
                raise DamagedMessageError(
                    f"It is a difference to version {header.base}, where {self.version} is held."
                )
            values = _decode_difference(method, data, self.values.to(data.device))
        else:
            codec = _INT8 if method == INT8_SYNC else None
            _check_size(method, data, codec.size(numel) if codec else numel * dtype.itemsize, numel)
            # A copy is aligned, which a part of a buffer need not be.
            values = codec.decode(data, numel, dtype) if codec else data.clone().view(dtype)
        if compute_checksum(values) != header.checksum:
            raise DamagedMessageError(f"The checksum of version {header.version} is another.")
        self._keep(values, header.version)
        return values

    def _keep(self, values: Tensor, version: int) -> None:
        if self.values is None:
            self.values = torch.empty(len(values), dtype=values.dtype)
        self.values.copy_(values)
        self.version = version


def compute_checksum(values: Tensor) -> int:
    """Return a 64-bit checksum of the values' bits that is equal on all devices. Each word of 4
    bytes is multiplied by its own odd number, so that no change of a single word, no swap of two
    words and no flip of one bit in two words, as from a stuck lane, goes unnoticed. (With words of
    8 bytes the highest bit would count alike in all of them.)"""
    raw = values.view(torch.uint8)
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 4)).view(torch.int32)
    found = torch.zeros((), dtype=torch.int64, device=raw.device)
    for number, part in enumerate(words.split(_CHECKSUM_WORDS)):
        first = number * _CHECKSUM_WORDS
        times = torch.arange(first, first + len(part), device=raw.device) * 2 + 1
        found += (part * times).sum()  # wraps, everywhere alike
    return int(found)


def _decode_difference(method: str, data: Tensor, held: Tensor) -> Tensor:
    if method == INT4_DELTA_SYNC:
        _check_size(method, data, _INT4.size(len(held)), len(held))
        return _apply_int4_difference(held, data)
    try:
        return sparse_delta.decode_sparse_delta(data, held)
    except ValueError as error:
        raise DamagedMessageError(str(error)) from error


def _check_size(method: str, data: Tensor, expected: int, numel: int) -> None:
    if len(data) != expected:
        raise DamagedMessageError(f"{len(data)} bytes are not {numel} values by {method}.")


def _apply_int4_difference(held: Tensor, data: Tensor) -> Tensor:
    return (held.float() + _INT4.decode(data, len(held), torch.float32)).to(held.dtype)


def _is_finite(values: Tensor, held: Tensor | None) -> bool:
    return bool(values.isfinite().all()) and (held is None or bool(held.isfinite().all()))


def _count_changed(before: Tensor, after: Tensor) -> int:
    integers = sparse_delta.INTEGER_DTYPES[after.itemsize][0]
    return int((before.view(integers) != after.view(integers)).sum())

"""Encoded parcels: as in `parcel_transfer`, for receivers that keep a record of the values that
they hold.

A parcel that is damaged, or is a difference to a version that its receiver does not have, is left
out, and its values are asked for: `ParcelEncoder.whole` makes parcels of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from hybridrl.errors import RolloutError
from hybridrl.layout.tensor_layout import TensorSink, TensorSource
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.weights.parcel_transfer import ParcelKey, ParcelReceiver, ParcelSender
from hybridrl.weights.weight_message import (
    DamagedMessageError,
    WeightMessage,
    WeightRecord,
)

EncodedParcel = tuple[ParcelKey, WeightMessage]
"""A message and the sender and number of its parcel."""


class ParcelEncoder:
    """An encoder of one rank's parcels, with a record of what their receivers hold.

    Args:
        device: Where values are compared; messages come in CPU memory.
    """

    def __init__(self, sender: ParcelSender, dtype: torch.dtype, device: torch.device) -> None:
        self._sender, self._dtype, self._device = sender, dtype, device
        self._records: list[WeightRecord] = []

    def encode(
        self, read: TensorSource, method: str, version: int, traffic: SyncCost
    ) -> Iterator[EncodedParcel]:
        """Encode the current values by `method`, and count bytes and seconds in `traffic`."""
        traffic.record = 0
        for key, data in self._sender.pack(read, self._device):
            if key.number == len(self._records):
                self._records.append(WeightRecord())
            record = self._records[key.number]
            begin = time.perf_counter()
            message = record.encode(data.view(self._dtype), method, version)
            message = message._replace(data=message.data.cpu())
            traffic.encode_seconds += time.perf_counter() - begin
            if message.changed is not None:
                traffic.changed += message.changed
                traffic.compared += data.nbytes // self._dtype.itemsize
            traffic.sent += len(message.data)
            traffic.record += record.nbytes
            yield key, message

    def forget(self) -> None:
        """Drop the records, so that the next parcels are not differences."""
        for record in self._records:
            record.forget()

    def whole(self) -> Iterator[EncodedParcel]:
        """Yield the values of the last `encode` in full."""
        for number, record in enumerate(self._records):
            yield ParcelKey(self._sender.rank, number), record.whole()


class ParcelDecoder:
    """A decoder of the parcels that one rank receives, with a record of what it holds.

    Attributes:
        lacking: Sender and number of the parcels that are still to come of this version.
    """

    def __init__(self, receiver: ParcelReceiver, dtype: torch.dtype, device: torch.device) -> None:
        self._receiver, self._dtype, self._device = receiver, dtype, device
        self._records = {place: WeightRecord() for place in receiver.wanted}
        self.lacking: list[ParcelKey] = []

    def begin(self) -> None:
        """Start a new version, for which all parcels are missing."""
        self.lacking = list(self._receiver.wanted)

    def forget(self) -> None:
        """Drop the records, for what comes next is not encoded."""
        for record in self._records.values():
            record.forget()

    def take(self, write: TensorSink, messages: Iterable[EncodedParcel]) -> SyncCost:
        """Write the values of the parcels that can be decoded; the others stay `missing`."""
        found, taken = SyncCost(), set()
        for place, message in messages:
            found.received += len(message.data)
            here = message._replace(data=message.data.to(self._device))
            try:
                values = self._records[place].decode(
                    here, self._receiver.elements(place), self._dtype
                )
            except DamagedMessageError:
                found.repeated += 1
                continue
            self._receiver.put(write, place, values)
            taken.add(place)
        self.lacking = [place for place in self.lacking if place not in taken]
        return found

    def complete(self, write: TensorSink, messages: Iterable[EncodedParcel]) -> SyncCost:
        """Write the values of the missing parcels.

        Raises:
            RolloutError: if something still is.
        """
        found = self.take(write, messages)
        if self.lacking:
            raise RolloutError(
                f"{len(self.lacking)} parcels of weights, the first from rank "
                f"{self.lacking[0].sender}, were damaged on their way, and so were the values that "
                "came in their place. Look for a fault in memory or network; "
                "rollout.weight_sync=full sends all weights each time."
            )
        return found

"""Execution of a plan between groups by encoded messages, each as large as its differences need.

As `CollectiveReshard`, in rounds of one all-to-all, but what a rank sends the same receivers in a
round is a message of `weights.weight_message`: its ends keep a record of what it brought before.
Headers with the sizes go first, among CPUs. A receiver that cannot use a message asks for its
values whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import LayoutError, RolloutError
from hybridrl.layout.tensor_layout import (
    TensorMove,
    TensorSink,
    TensorSource,
    TransferPlan,
    count_elements,
    pack_moves,
    unpack_moves,
)
from hybridrl.system.device_traits import default_bucket_bytes
from hybridrl.weights.parcel_transfer import (
    compute_round_capacity,
    cut_into_rounds,
)
from hybridrl.weights.weight_message import (
    FULL_SYNC,
    DamagedMessageError,
    MessageHeader,
    WeightMessage,
    WeightRecord,
)


@dataclass
class SyncCost:
    """The cost of a weight sync on this rank, in bytes of the generation precision.

    Attributes:
        received, sent: From and to other ranks, on the wire.
        peak: Parameters at the fullest moment, those of both layouts, what they share once.
        redundant: Of the training parameters those that generation on this rank has no use for.
        buffer: Most memory for messages and what they are made of.
        method: Of `weight_message.SYNC_METHODS`.
        changed, compared: Values that this rank sent as differences, each counted once however many
            receive it: those that had changed, and all.
        encode_seconds: What it took to make messages, checksums and records included.
        record: Bytes of the host's memory for what the receivers hold.
        repeated: Messages that were damaged on their way and had to be sent a second time.
    """

    received: int = 0
    sent: int = 0
    peak: int = 0
    redundant: int = 0
    buffer: int = 0
    method: str = FULL_SYNC
    changed: int = 0
    compared: int = 0
    encode_seconds: float = 0.0
    record: int = 0
    repeated: int = 0


class _StreamEnd(NamedTuple):
    """One end of a stream's messages in one round, on this rank.

    Attributes:
        moves: Whose values the message has, one after the other.
        size: Elements.
        peers: Who receives it; or, at the other end, its sender.
    """

    moves: list[TensorMove]
    size: int
    peers: tuple[int, ...]
    record: WeightRecord


class _Round(NamedTuple):
    sends: list[_StreamEnd]
    receives: list[_StreamEnd]


class _MessagesInFlight(NamedTuple):
    """An exchange in flight; `outgoing` must live until it is done.

    Attributes:
        arriving: What comes in, with its header, in the order of the buffer.
    """

    work: dist.Work
    outgoing: Tensor
    incoming: Tensor
    arriving: list[tuple[_StreamEnd, MessageHeader]]


class EncodedReshard:
    """An executor of a plan between sending and receiving ranks of `group` that sends differences
    to recorded values.

    Making and calling it are collective, as for `CollectiveReshard`.

    Args:
        plan, dtype, device, group: As `CollectiveReshard`'s.

    Raises:
        LayoutError: if a rank would copy to itself.
    """

    def __init__(
        self,
        plan: TransferPlan,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._dtype, self._device, self._group = dtype, device, group
        self._rank, self._size = group.rank(), group.size()
        mine = plan.of(self._rank)
        if mine.copies:
            raise LayoutError(
                f"The plan copies inside rank {self._rank}: only what travels between ranks that "
                "train and others that generate is sent as differences. Use CollectiveReshard."
            )
        room = compute_round_capacity(default_bucket_bytes(device.type), dtype)
        self._rounds: list[_Round] = []
        for parts in cut_into_rounds(mine.moves, group, room):
            ends = _Round([], [])
            self._rounds.append(ends)
            for stream, moves in parts:
                if size := count_elements(moves):
                    sends = stream.sender == self._rank
                    peers = stream.receivers if sends else (stream.sender,)
                    end = _StreamEnd(moves, size, peers, WeightRecord())
                    (ends.sends if sends else ends.receives).append(end)

    def __call__(
        self, read: TensorSource, write: TensorSink, method: str, version: int
    ) -> SyncCost:
        """Send the values that `read` returns and write what arrives with `write`. Collective.

        Args:
            method: Of `SYNC_METHODS`, the same on all ranks.
            version: Of the values; later calls have higher ones.

        Raises:
            RolloutError: if a message is damaged and so is what is sent in its place.
        """
        found = SyncCost()
        damaged: set[int] = set()  # by identity of their records
        before: _MessagesInFlight | None = None
        for each in self._rounds:
            begin = time.perf_counter()
            messages = [self._encode(end, read, method, version, found) for end in each.sends]
            found.encode_seconds += time.perf_counter() - begin
            outgoing = list(zip(each.sends, messages, strict=True))
            now = self._exchange(outgoing, each.receives, found)
            damaged |= self._take(before, write)
            before = now
        damaged |= self._take(before, write)
        self._repair(damaged, write, found)
        ends = [end for each in self._rounds for end in (*each.sends, *each.receives)]
        found.record = sum(end.record.nbytes for end in ends)
        return found

    def forget(self) -> None:
        """Release the memory of the records; the next values are sent in full."""
        for each in self._rounds:
            for end in (*each.sends, *each.receives):
                end.record.forget()

    def records(self) -> Iterator[tuple[list[TensorMove], Tensor]]:
        """Yield the moves of every message that this rank sends or receives, with the values that
        its receivers hold: flat, one move after the other."""
        for each in self._rounds:
            for end in (*each.sends, *each.receives):
                if (values := end.record.values) is not None:
                    yield end.moves, values

    def _encode(
        self, end: _StreamEnd, read: TensorSource, method: str, version: int, found: SyncCost
    ) -> WeightMessage:
        values = torch.empty(end.size, dtype=self._dtype, device=self._device)
        pack_moves(end.moves, read, values)
        message = end.record.encode(values, method, version)
        if message.changed is not None:
            found.changed += message.changed
            found.compared += end.size
        return message

    def _exchange(
        self,
        outgoing: Sequence[tuple[_StreamEnd, WeightMessage]],
        receives: Sequence[_StreamEnd],
        found: SyncCost,
    ) -> _MessagesInFlight:
        """Send messages to all peers of their ends and start receiving those of `receives`, which
        arrive in the same order from each sender."""
        to: list[list[WeightMessage]] = [[] for _ in range(self._size)]
        for end, message in outgoing:
            for rank in end.peers:
                to[rank].append(message)
        arriving = self._headers(to, receives)
        sizes = [0] * self._size
        for end, header in arriving:
            sizes[end.peers[0]] += header.size
        sent = [sum(len(message.data) for message in messages) for messages in to]
        # What is sent once more comes from the records, in the host's memory.
        parts = [message.data.to(self._device) for messages in to for message in messages]
        out = torch.cat(parts) if parts else self._bytes(0)
        incoming = self._bytes(sum(sizes))
        work = dist.all_to_all_single(incoming, out, sizes, sent, group=self._group, async_op=True)
        found.sent += sum(sent)
        found.received += sum(sizes)
        raw = sum(end.size for end, _ in outgoing) * self._dtype.itemsize
        found.buffer = max(found.buffer, raw + 2 * len(out) + 2 * len(incoming))
        return _MessagesInFlight(work, out, incoming, arriving)

    def _headers(
        self, to: Sequence[Sequence[WeightMessage]], receives: Sequence[_StreamEnd]
    ) -> list[tuple[_StreamEnd, MessageHeader]]:
        width = len(MessageHeader._fields)
        rows = [message.header for messages in to for message in messages]
        out = torch.tensor(rows, dtype=torch.int64).flatten()
        incoming = torch.empty(len(receives) * width, dtype=torch.int64)
        counts = [0] * self._size
        for end in receives:
            counts[end.peers[0]] += width
        sent = [len(messages) * width for messages in to]
        dist.all_to_all_single(incoming, out, counts, sent, group=self._group)
        headers = [MessageHeader(*row) for row in incoming.view(-1, width).tolist()]
        return list(zip(receives, headers, strict=True))

    def _take(self, travelling: _MessagesInFlight | None, write: TensorSink) -> set[int]:
        """Write the values that have arrived and return the ends whose messages are damaged."""
        damaged: set[int] = set()
        if travelling is None:
            return damaged
        travelling.work.wait()
        at = 0
        for end, header in travelling.arriving:
            message = WeightMessage(header, travelling.incoming[at : at + header.size])
            at += header.size
            try:
                values = end.record.decode(message, end.size, self._dtype)
            except DamagedMessageError:
                damaged.add(id(end.record))
            else:
                unpack_moves(end.moves, write, values)
        return damaged

    def _repair(self, damaged: set[int], write: TensorSink, found: SyncCost) -> None:
        """Request damaged messages again, in full."""
        any_damaged = torch.tensor([len(damaged)])
        dist.all_reduce(any_damaged, dist.ReduceOp.MAX, group=self._group)
        if not any_damaged.item():
            return
        for each in self._rounds:
            asked = [end for end in each.receives if id(end.record) in damaged]
            again = self._asked_for(each, damaged)
            found.repeated += len(again)
            left = self._take(self._exchange(again, asked, found), write)
            if left:
                raise RolloutError(
                    f"{len(left)} messages of weights from rank "
                    f"{asked[0].peers[0]} were damaged on their way to rank {self._rank}, and so "
                    "were the values that were sent in their place. Look for a fault in memory "
                    "or network; rollout.weight_sync=full sends all weights each time."
                )

    def _asked_for(self, each: _Round, damaged: set[int]) -> list[tuple[_StreamEnd, WeightMessage]]:
        """Return the messages that other ranks request again from this one."""
        counts = [0] * self._size
        for end in each.receives:
            counts[end.peers[0]] += 1
        flags = torch.tensor([id(end.record) in damaged for end in each.receives]).long()
        ends = [
            (rank, end) for rank in range(self._size) for end in each.sends if rank in end.peers
        ]
        wanted = torch.empty(len(ends), dtype=torch.int64)
        mine = [sum(rank == at for at, _ in ends) for rank in range(self._size)]
        dist.all_to_all_single(wanted, flags, mine, counts, group=self._group)
        return [
            (end._replace(peers=(rank,)), end.record.whole())
            for (rank, end), is_wanted in zip(ends, wanted.tolist(), strict=True)
            if is_wanted
        ]

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

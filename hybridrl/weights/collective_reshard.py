"""Execution of a plan over torch.distributed: one all-to-all per round."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.layout.tensor_layout import (
    TensorMove,
    TensorSink,
    TensorSource,
    TransferPlan,
    TransferTraffic,
    copy_moves,
    count_elements,
    pack_moves,
    unpack_moves,
)
from hybridrl.system.device_traits import default_bucket_bytes
from hybridrl.weights.parcel_transfer import (
    Stream,
    compute_round_capacity,
    cut_into_rounds,
    max_adjacent_sum,
)


class _Round(NamedTuple):
    """The part of this rank in one round, in elements.

    Attributes:
        sends: What goes out, each with its places in the outgoing buffer, one for every receiver.
        receives: What comes in, in the order of the incoming buffer.
        to, from_: By rank, how much.
    """

    sends: list[tuple[list[TensorMove], list[int]]]
    receives: list[TensorMove]
    to: dict[int, int]
    from_: dict[int, int]

    @property
    def size(self) -> int:
        return sum(self.to.values()) + sum(self.from_.values())


class _RoundInFlight(NamedTuple):
    """A round in flight."""

    work: dist.Work
    incoming: Tensor
    receives: list[TensorMove]


class CollectiveReshard:
    """An executor of a plan, cut into rounds for this rank and run each time there are new weights.

    The ranks of the plan are the ranks of `group`. All of them make it and call it, with equal
    arguments but for the tensors; one that neither sends nor receives takes part all the same.
    Making it is collective, too.

    Args:
        plan: Of two layouts that may share ranks; this rank's part of it is enough.
        dtype: Of the target. Senders cast, so that nothing wider travels.
        device: Where the buffer is and the collective runs: the group's kind of device.
        group: None: the default process group.
        bucket_bytes: All memory that is needed beyond the tensors themselves; None: what suits the
            kind of device.

    Raises:
        ConfigError: if the bucket is too small for an element of each message.
    """

    def __init__(
        self,
        plan: TransferPlan,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self._dtype, self._device, self._group = dtype, device, group
        group = group or dist.group.WORLD
        assert group is not None, "a process group has been begun"
        self._rank, self._size = group.rank(), group.size()
        bucket_bytes = default_bucket_bytes(device.type) if bucket_bytes is None else bucket_bytes
        self._room = compute_round_capacity(bucket_bytes, dtype)
        mine = plan.of(self._rank)
        self._copies = mine.copies
        self._rounds = [
            self._round(parts) for parts in cut_into_rounds(mine.moves, group, self._room)
        ]
        itemsize = dtype.itemsize
        self._traffic = TransferTraffic(
            received=itemsize * sum(sum(each.from_.values()) for each in self._rounds),
            sent=itemsize * sum(sum(each.to.values()) for each in self._rounds),
            rounds=len(self._rounds),
            buffer=itemsize * max_adjacent_sum([each.size for each in self._rounds]),
        )

    def __call__(self, read: TensorSource, write: TensorSink) -> TransferTraffic:
        """Copy the values of the tensors that `read` returns to where `write` puts them.
        Collective.

        Own values are copied first and never touch the network. While a round travels, the one
        before it is unpacked and the one after it packed.
        """
        copied = copy_moves(self._copies, read, write, self._dtype, self._room)
        largest = max((each.size for each in self._rounds), default=0)
        count = min(2, len(self._rounds))
        buffers = [
            torch.empty(largest, dtype=self._dtype, device=self._device) for _ in range(count)
        ]
        before: _RoundInFlight | None = None
        for index, each in enumerate(self._rounds):
            now = self._send(each, read, buffers[index % 2])
            _unpack_round(before, write)
            before = now
        _unpack_round(before, write)
        return replace(self._traffic, copied=copied * self._dtype.itemsize)

    def _send(self, each: _Round, read: TensorSource, buffer: Tensor) -> _RoundInFlight:
        out, into = sum(each.to.values()), sum(each.from_.values())
        outgoing, incoming = buffer[:out], buffer[out : out + into]
        for moves, places in each.sends:
            size = count_elements(moves)
            first = outgoing[places[0] : places[0] + size]
            pack_moves(moves, read, first)
            for place in places[1:]:
                outgoing[place : place + size].copy_(first)
        # As bytes, because not every back end knows every dtype.
        work = dist.all_to_all_single(
            incoming.view(torch.uint8),
            outgoing.view(torch.uint8),
            [each.from_.get(rank, 0) * self._dtype.itemsize for rank in range(self._size)],
            [each.to.get(rank, 0) * self._dtype.itemsize for rank in range(self._size)],
            group=self._group,
            async_op=True,
        )
        return _RoundInFlight(work, incoming, each.receives)

    def _round(self, parts: list[tuple[Stream, list[TensorMove]]]) -> _Round:
        """Build a round; its buffer holds one rank's messages after another's, each in the order of
        streams."""
        found = _Round([], [], {}, {})
        slots: list[tuple[int, int, int]] = []  # receiver, which of the sends, elements
        for stream, moves in parts:
            size = count_elements(moves)
            if size and stream.sender == self._rank:
                slots += [(rank, len(found.sends), size) for rank in stream.receivers]
                found.sends.append((moves, []))
            elif size:
                found.receives.extend(moves)  # streams are in the order of their senders
                found.from_[stream.sender] = found.from_.get(stream.sender, 0) + size
        at = 0
        for rank, number, size in sorted(slots):
            found.sends[number][1].append(at)
            found.to[rank] = found.to.get(rank, 0) + size
            at += size
        return found


def _unpack_round(travelling: _RoundInFlight | None, write: TensorSink) -> None:
    if travelling is not None:
        travelling.work.wait()
        unpack_moves(travelling.receives, write, travelling.incoming)

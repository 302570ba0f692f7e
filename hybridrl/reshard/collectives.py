"""Executing a plan over torch.distributed: one all-to-all per round."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.core.boxes import volume
from hybridrl.core.layout import Move, Plan
from hybridrl.reshard.parcels import (
    DEFAULT_BUCKET_BYTES,
    Read,
    Traffic,
    Write,
    bucket_elements,
    copy,
    pack,
    rounds,
    unpack,
)


class Reshard:
    """A plan, cut into rounds for this rank; executed as often as there are new weights.

    The ranks of the plan are the ranks of `group`. All of them make it and call it, with equal
    arguments but for the tensors; one that neither sends nor receives takes part all the same.

    Args:
        plan: Of two layouts that may share ranks.
        dtype: Of the target. Senders cast, so that nothing wider travels.
        device: Where the buffer is and the collective runs: the group's kind of device.
        group: None: the default process group.
        bucket_bytes: What is sent and received in a round, together: all memory that is needed
            beyond the tensors themselves.

    Raises:
        ConfigError: if the bucket is too small for two elements.
    """

    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._dtype, self._device, self._group = dtype, device, group
        group = group or dist.group.WORLD
        self._rank, self._size = group.rank(), group.size()
        self._bucket = bucket_elements(bucket_bytes, dtype)
        self._copies = [move for move in plan.copies if move.receiver == self._rank]
        self._rounds = [
            (
                [move for move in moves if move.sender == self._rank],
                [move for move in moves if move.receiver == self._rank],
            )
            for moves in rounds(plan, self._bucket)
        ]
        loads = [_volume(sends) + _volume(receives) for sends, receives in self._rounds]
        self._largest = max(loads, default=0)

    def __call__(self, read: Read, write: Write) -> Traffic:
        """Brings the values from the tensors that `read` gives to the places that `write` fills.

        Own values are copied first and never touch the network. Returns what was counted while it
        happened.
        """
        copied = copy(self._copies, read, write, self._dtype, self._bucket)
        traffic = Traffic(copied=copied * self._dtype.itemsize)
        buffer = torch.empty(self._largest, dtype=self._dtype, device=self._device)
        for sends, receives in self._rounds:
            outgoing = buffer[: _volume(sends)]
            incoming = buffer[len(outgoing) : len(outgoing) + _volume(receives)]
            pack(sends, read, outgoing)
            self._exchange(outgoing, sends, incoming, receives)
            unpack(receives, write, incoming)
            traffic = replace(
                traffic,
                received=traffic.received + incoming.nbytes,
                sent=traffic.sent + outgoing.nbytes,
                rounds=traffic.rounds + 1,
                buffer=max(traffic.buffer, outgoing.nbytes + incoming.nbytes),
            )
        return traffic

    def _exchange(
        self, outgoing: Tensor, sends: list[Move], incoming: Tensor, receives: list[Move]
    ) -> None:
        # As bytes, because not every back end knows every dtype.
        to, from_ = [0] * self._size, [0] * self._size
        for move in sends:
            to[move.receiver] += volume(move.box) * self._dtype.itemsize
        for move in receives:
            from_[move.sender] += volume(move.box) * self._dtype.itemsize
        dist.all_to_all_single(
            incoming.view(torch.uint8), outgoing.view(torch.uint8), from_, to, group=self._group
        )


def reshard(
    plan: Plan,
    read: Read,
    write: Write,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Traffic:
    """Executes a plan once; see `Reshard`."""
    return Reshard(plan, dtype, device, group, bucket_bytes)(read, write)


def _volume(moves: list[Move]) -> int:
    return sum(volume(move.box) for move in moves)

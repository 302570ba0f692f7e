"""The channel that brings new weights to ranks that only generate.

Those that train call `send`, those that generate `receive`: the same number of times, whenever each
gets there. What waits is the side that is early.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch.batch import Batch
from hybridrl.errors import ConfigError, RolloutError
from hybridrl.parallel.process_group import find_store
from hybridrl.rollout.rollout_engine import RolloutEngine, ragged
from hybridrl.system.collective_waits import count_wait
from hybridrl.system.device_traits import synchronize_device
from hybridrl.weights.encoded_parcels import (
    EncodedParcel,
    ParcelDecoder,
    ParcelEncoder,
)
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.weights.parcel_transfer import (
    ParcelKey,
    ParcelManifest,
    ParcelReceiver,
    ParcelSender,
    WeightParcel,
)
from hybridrl.weights.sync_choice import AUTO_SYNC, PLAIN_SYNC, SyncMethodChoice
from hybridrl.weights.weight_message import DELTA_SYNC, FULL_SYNC, MessageHeader, WeightMessage
from hybridrl.weights.weight_sync import WeightSource, WeightSync


class WeightChannel:
    """One end of the channel from trainer to generator.

    Building it is collective over `group`.

    Args:
        group: The ranks that train, then those that generate.
        dtype: Precision of the rollout engine's weights.
        train, rollout: What this rank has: one of them.
        verify: Send all weights whole besides and compare them; as slow as that.
        adapters: Of a model that has any, they alone go.
        parcels: Weights do not travel in the group but as parcels: `pack` and `unpack`.
        method: `rollout.weight_sync`.
        refresh: `rollout.weight_sync_refresh`.

    Attributes:
        count: How many times weights were sent, or received, by this rank.
        cost: Of the last parcels; None: it is not known.

    Raises:
        ConfigError: if weights have to go whole and the settings want it otherwise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        train: WeightSource | None = None,
        rollout: RolloutEngine | None = None,
        verify: bool = False,
        adapters: bool = False,
        parcels: bool = False,
        method: str = FULL_SYNC,
        refresh: int = 0,
    ) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        self._train, self._rollout = train, rollout
        self._sync = WeightSync.across(group, dtype, device, train, rollout)
        self._adapters = adapters
        self._verify = verify and self._sync is not None
        self._choice = SyncMethodChoice(method, refresh)
        self.count = 0
        self.cost: SyncCost | None = None
        self._by_parcels = parcels
        if self._sync is None and method not in (AUTO_SYNC, FULL_SYNC):
            raise ConfigError(
                f"rollout.weight_sync={method} needs weights that travel box by box, and these "
                "have to go whole: adapters (actor.lora), or an architecture that rollout.engine "
                "cannot take apart. Set rollout.weight_sync=auto."
            )
        if parcels:
            self._prepare_parcels()

    @torch.no_grad()
    def send(self, version: int) -> SyncCost | None:
        """Send the trainer's current weights as this version. Collective."""
        self.count += 1
        if self._group.rank() == 0:
            find_store(self._group).set(f"sent/{self.count}", str(version))
        cost = None if self._sync is None else self._run(self._sync)
        if self._sync is None or self._verify:
            self._send_whole()
        return cost

    @property
    def has_come(self) -> bool:
        """True if a version is being sent that this rank has not received."""
        return bool(find_store(self._group).check([f"sent/{self.count + 1}"]))

    @torch.no_grad()
    def receive(self) -> tuple[int, SyncCost | None]:
        """Receive the next weights, waiting for them if necessary, and return their version.
        Collective."""
        self.count += 1
        with count_wait():
            version = int(find_store(self._group).get(f"sent/{self.count}"))
        rollout = self._generating()
        cost = None if self._sync is None else self._run(self._sync)
        if self._sync is None:
            rollout.load(self._receive_whole())
        elif self._verify and (wrong := rollout.differences(self._receive_whole())):
            raise RolloutError(
                f"{len(wrong)} parts of the generator's weights are not those of the trainer's "
                f"version {version}: {' '.join(wrong[:3])}"
            )
        synchronize_device(self._device)
        return version, cost

    @torch.no_grad()
    def pack(self, method: str | None = None) -> tuple[Batch, range, int]:
        """Pack the current weights into parcels: return those of this rank, their numbers among all
        parcels, and the number of all. They may be differences to the last ones; see
        `pack_whole`.

        Args:
            method: None: by the setting.
        """
        self.count += 1
        read = self._training().local_parameters().__getitem__
        method = method or (self._choice.method() if self._choice.keeps else PLAIN_SYNC)
        if method == PLAIN_SYNC:
            self._encoder.forget()
            self.cost = None
            return self._as_rows(_parcels_to_batch(list(self._sender.pack(read))))
        traffic = SyncCost()
        coded = list(self._encoder.encode(read, method, self.count, traffic))
        self.cost = self._parcel_sync.cost(method, traffic)
        return self._as_rows(_encoded_to_batch(coded))

    @torch.no_grad()
    def pack_whole(self) -> tuple[Batch, range, int]:
        """Pack the weights of the last `pack` in full, for receivers that missed earlier
        parcels or cannot decode one of the last."""
        return self._as_rows(_encoded_to_batch(list(self._encoder.whole())))

    def restart(self) -> None:
        """Make the next weights independent of what was sent before, as if nothing had been. Only
        for the sender: a receiver takes full values in any state."""
        self._choice.restart()
        if self._sync is not None and self._sync.coded is not None:
            self._sync.coded.forget()
        if self._by_parcels:
            self._encoder.forget()

    @property
    def wanted(self) -> list[int]:
        """The numbers, among all parcels, of those that this rank needs."""
        return self._numbers(self._receiver.wanted)

    @property
    def lacking(self) -> list[int]:
        """The numbers of the parcels of the last `unpack` version that this rank still
        needs."""
        return self._numbers(self._decoder.lacking)

    @torch.no_grad()
    def unpack(self, parcels: Batch) -> None:
        """Load weights from the parcels that this rank needs, in any order. If some cannot be
        decoded, `complete` has to follow."""
        self.count += 1
        self._writer = self._generating().writer()
        if "header" not in parcels:  # packed without a record
            self._decoder.forget()
            taken = self._receiver.take(self._writer.write_boxes, _batch_to_parcels(parcels))
            method, traffic = FULL_SYNC, SyncCost(received=taken.received)
        else:
            self._decoder.begin()
            traffic = self._decoder.take(self._writer.write_boxes, _batch_to_encoded(parcels))
            method = DELTA_SYNC
        self.cost = self._parcel_sync.cost(method, traffic)
        if not self._decoder.lacking:
            self._finish()

    @torch.no_grad()
    def complete(self, parcels: Batch) -> None:
        """Load the missing weights from the parcels of `pack_whole`, if any are missing."""
        if self._decoder.lacking:
            traffic = self._decoder.complete(self._writer.write_boxes, _batch_to_encoded(parcels))
            self.cost = self._parcel_sync.cost(FULL_SYNC, traffic)
            self._finish()

    def _finish(self) -> None:
        self._writer.finish()
        synchronize_device(self._device)

    def _numbers(self, places: Sequence[ParcelKey]) -> list[int]:
        return [self._first[sender] + number for sender, number in places]

    def _as_rows(self, parcels: Batch) -> tuple[Batch, range, int]:
        first = self._first[self._group.rank()]
        return parcels, range(first, first + len(parcels)), self._total

    def _training(self) -> WeightSource:
        assert self._train is not None, "ranks that train send"
        return self._train

    def _generating(self) -> RolloutEngine:
        assert self._rollout is not None, "ranks that generate receive"
        return self._rollout

    def _run(self, sync: WeightSync) -> SyncCost:
        """Run one sync by the method that is set, or by the fastest so far."""
        measures, method = self._choice.measures, self._choice.method()
        begin = 0.0
        if measures:
            self._highest(0.0)  # who is late is late for both methods
            begin = time.perf_counter()
        is_plain = method == PLAIN_SYNC
        cost = sync.run() if is_plain else sync.run_coded(method, self.count)
        if measures:
            synchronize_device(self._device)
            self._choice.note(method, self._highest(time.perf_counter() - begin))
            if not self._choice.keeps and sync.coded is not None:
                sync.coded.forget()
        return cost

    def _highest(self, number: float) -> float:
        """Return the maximum over all ranks, once all have arrived."""
        said = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group)
        return float(said)

    def _prepare_parcels(self) -> None:
        """Plan which rank makes and which takes which parcels. Collective."""
        if self._sync is None:
            raise ConfigError(
                "placement.transport=store needs weights that travel box by box, and these have to "
                "go whole: adapters (actor.lora), or an architecture that rollout.engine cannot "
                "take apart. Set placement.transport=collective and placement.staleness=1 or 0."
            )
        self._parcel_sync, plan, rank = self._sync, self._sync.plan, self._group.rank()
        self._sender = ParcelSender(plan, rank, self._dtype)
        manifests: list[ParcelManifest] = [()] * self._group.size()
        dist.all_gather_object(manifests, self._sender.manifest, group=self._group)
        self._receiver = ParcelReceiver(plan, rank, self._dtype, dict(enumerate(manifests)))
        self._encoder = ParcelEncoder(self._sender, self._dtype, self._device)
        self._decoder = ParcelDecoder(self._receiver, self._dtype, self._device)
        counts = [sum(count for _, count in manifest) for manifest in manifests]
        self._first = [0, *itertools.accumulate(counts)]
        self._total = self._first.pop()

    def _send_whole(self) -> None:
        for name, tensor in self._training().weights_for(self._adapters):
            self._tell((name, tuple(tensor.shape)))
            whole = tensor.to(self._device, self._dtype).contiguous()
            dist.broadcast(whole, group=self._group, group_src=0)
        self._tell(None)

    def _receive_whole(self) -> Iterator[tuple[str, Tensor]]:
        while (header := self._tell(None)) is not None:
            name, shape = header
            whole = torch.empty(shape, dtype=self._dtype, device=self._device)
            dist.broadcast(whole, group=self._group, group_src=0)
            yield name, whole

    def _tell(self, value: Any) -> Any:
        """Broadcast a value from the first rank and return it."""
        found = [value]
        dist.broadcast_object_list(found, group=self._group, group_src=0)
        return found[0]


def _parcels_to_batch(parcels: Sequence[WeightParcel]) -> Batch:
    return Batch.from_columns(
        {
            "sender": torch.tensor([key.sender for key, _ in parcels], dtype=torch.int64),
            "number": torch.tensor([key.number for key, _ in parcels], dtype=torch.int64),
            "data": [data for _, data in parcels] or ragged([], np.uint8),
        }
    )


def _encoded_to_batch(coded: Sequence[EncodedParcel]) -> Batch:
    """Build a batch of encoded parcels with the headers of their messages."""
    parcels = [(key, message.data) for key, message in coded]
    headers = [torch.tensor(message.header) for _, message in coded] or ragged([], np.int64)
    return _parcels_to_batch(parcels).with_columns({"header": headers})


def _batch_to_encoded(batch: Batch) -> Iterator[EncodedParcel]:
    headers = batch["header"].rows()
    for (key, data), header in zip(_batch_to_parcels(batch), headers, strict=True):
        yield key, WeightMessage(MessageHeader(*header.tolist()), data)


def _batch_to_parcels(batch: Batch) -> Iterator[WeightParcel]:
    places = zip(batch["sender"].tolist(), batch["number"].tolist(), strict=True)
    for (sender, number), data in zip(places, batch["data"].rows(), strict=True):
        # Plain: each goes through many operations, and none writes into it.
        yield ParcelKey(sender, number), data.as_subclass(torch.Tensor)

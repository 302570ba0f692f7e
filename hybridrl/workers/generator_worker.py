"""GeneratorWorker: generates for the actor, on devices of its own, with weights that come to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import EnvironmentConfig, RolloutConfig
from hybridrl.controller import (
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    PartialTable,
    WorkerContext,
    transfer,
)
from hybridrl.controller.worker import Rendezvous
from hybridrl.engine.hybrid_engine import add_response_mask
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh
from hybridrl.parallel import process_group
from hybridrl.parallel.collectives import make_own_group
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.sample_generator import (
    GenerationTask,
    ReplicaShare,
    SampleStream,
)
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.locations import parse_location
from hybridrl.weights.weight_channel import WeightChannel
from hybridrl.workers.generation import (
    GENERATED_COLUMNS,
    SampleSeeds,
    add_policy_version,
    is_generation_input,
    list_continued_columns,
    list_optional_columns,
    report_generation,
    report_weights_received,
)
from hybridrl.workers.model_worker import ModelWorker
from hybridrl.workers.rollout_engines import build_rollout_engine, setup_of
from hybridrl.workers.training_engines import ModelSource


class GeneratorWorker(ModelWorker):
    """One rank of a replica that generates.

    Args:
        source: The model.
        rollout: Generation.
        environment: What plays the samples; None, or without a name: nothing does.
        seed: Of all sampling.
        job: A name that no other job on this machine has.
        in_flight: Take new weights between two tokens, when they come.
        neighbours: See `ReplicaShare`.
    """

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        rollout: RolloutConfig,
        seed: int,
        job: str,
        in_flight: bool = False,
        environment: EnvironmentConfig | None = None,
        neighbours: bool = False,
    ) -> None:
        super().__init__(context)
        self._config = rollout
        self._dtype = DTYPES[source.dtype]
        self._seeds = SampleSeeds(seed)
        self._in_flight, self._neighbours = in_flight, neighbours
        self._started = 0
        self._version = 0
        self._samples: SampleStream
        self._begun: Batch | None = None
        share = rollout.parallel.ranks
        mesh = RankMesh({"rollout_dp": context.world_size // share, "rollout_tp": share})
        self._place = mesh.coordinates(context.rank)
        self._device = process_group.join_group_world(context)
        self._world = dist.group.WORLD
        self._peers = make_own_group(mesh.groups("rollout_tp"))
        self._generator = build_rollout_engine(
            source,
            rollout,
            setup_of(source, self._device, seed, job, changes_in_flight=in_flight),
            environment=environment,
            context=context,
            peers=self._peers,
        )

    def coordinates(self) -> Mapping[str, MeshCoordinate]:
        return self._place

    @transfer(ONE_TO_ALL)
    def join_trainer(
        self, rendezvous: Rendezvous, senders: int, parcels: bool, weight_sync: str
    ) -> None:
        """Join a process group with the ranks that train, which come before those of this group.

        Args:
            parcels: To take weights by `load_weights`.
            weight_sync: As the setting `rollout.weight_sync`.
        """
        rank, size = senders + self.context.rank, senders + self.context.world_size
        group = process_group.join_world(
            "weights", rank, size, rendezvous, self.context.device_kind
        )
        self.enter()
        self._channel = WeightChannel(
            group,
            self._dtype,
            self._device,
            rollout=self._generator.engine,
            verify=self._config.verify_weights,
            parcels=parcels,
            method=weight_sync,
            refresh=self._config.weight_sync_refresh,
        )

    @transfer(ONE_TO_ALL)
    def receive_weights(self, count: int) -> None:
        """Receive weights until this many versions have been received in all."""
        with self.phase("sync"):
            while self._channel.count < count:
                self._receive()

    def wanted_parcels(self) -> np.ndarray:
        """Return the numbers of the parcels that this rank needs."""
        return np.asarray(self._channel.wanted, dtype=np.int64)

    @transfer(ONE_TO_ALL, rows=wanted_parcels)
    def load_weights(self, parcels: Batch, version: int) -> None:
        """Load weights that came as parcels."""
        with self.phase("sync"):
            self._channel.unpack(parcels)
        cost = self._channel.cost
        assert cost is not None  # of parcels that were just unpacked
        report_weights_received(self, cost)
        # The trainer does not hear of parcels that could not be used.
        self.report(sync_repeated=cost.repeated)
        self._version = version

    def lacking_parcels(self) -> np.ndarray:
        """Return the numbers of the parcels that the last `load_weights` could not use."""
        return np.asarray(self._channel.lacking, dtype=np.int64)

    @transfer(ONE_TO_ALL, rows=lacking_parcels)
    def complete_weights(self, parcels: Batch) -> None:
        """Load the parts that the last `load_weights` could not use, from parcels of full
        weights."""
        if self._channel.lacking:
            with self.phase("sync"):
                self._channel.complete(parcels)
            report_weights_received(self, self._channel.cost)

    @transfer(
        ONE_TO_ALL,
        reads=("prompt_ids",),
        may_read=is_generation_input,
        follows=list_continued_columns,
    )
    def start_sequences(self, batch: Batch, sampling: SamplingSettings) -> None:
        """Start generating a response for each row; `take_sequences` returns them."""
        place = self.coordinates()["rollout_dp"]
        seeds = self._seeds.next(range(len(batch)), sampling.series)
        self._total = len(batch)
        self._begun = None if sampling.partial is None else batch
        self._started += 1
        claim = partial(self._claim, self._started)
        share = ReplicaShare(place.index, place.size, claim, self._neighbours)
        task = GenerationTask(batch, sampling, seeds, self._version, share)
        self._samples = self._generator.begin(task)

    @transfer(THREE_D_ALL_MICRO_DP, makes=GENERATED_COLUMNS, may_make=list_optional_columns)
    def take_sequences(self, part: int, parts: int) -> Batch:
        """Return the samples that have finished since the last call, about one of `parts` of all.
        The columns are those of `ActorWorker.generate_sequences`."""
        with self.phase("generate"):
            samples, rows = self._finished(part, parts)
        if part == parts - 1:
            self._samples.close()
        samples = add_response_mask(samples)
        before = self._begun and self._begun.take(rows)
        report_generation(self, self._generator, samples, before, self._version)
        return PartialTable(samples, rows, self._total)  # type: ignore[return-value]

    @transfer(ONE_TO_ALL)
    def save_state(self, folder: str) -> None:
        """Save the counter of generations in the folder of the actor's state. The weights are the
        actor's."""
        if self.context.rank == 0:
            self._seeds.save(parse_location(folder))

    @transfer(ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Load the counter of generations; the weights come from the actor, as always."""
        self._seeds.load(parse_location(folder))

    def close(self) -> None:
        self._generator.close()

    def _finished(self, part: int, parts: int) -> tuple[Batch, np.ndarray]:
        place = self.coordinates()["rollout_dp"]
        share = -(-self._total // (place.size * parts))
        least = share if part < parts - 1 else self._total
        refresh = self._refresh if self._in_flight else None
        samples, rows = self._samples.next_samples(least, refresh)
        keeps_tokens = self._in_flight or self._begun is not None
        return add_policy_version(samples, self._version, keeps_tokens=keeps_tokens), rows

    def _refresh(self) -> int:
        """Receive new weights if there are any, and return the version that generates now."""
        if self._first_says(self._channel.has_come):
            self._receive()
        return self._version

    def _receive(self) -> None:
        self._version, cost = self._channel.receive()
        report_weights_received(self, cost)

    def _claim(self, generation: int, queue: int) -> int:
        """Return the next number of a queue that no replica has; see `ReplicaShare`."""
        number = 0
        if self.coordinates()["rollout_tp"].index == 0:
            assert self._world is not None
            store = process_group.find_store(self._world)
            number = store.add(f"claimed/{generation}/{queue}", 1) - 1
        return self._first_says(number)

    def _first_says(self, number: int) -> int:
        """Return the number of the replica's first rank, on all its ranks."""
        if self._peers is None:
            return number
        said = torch.tensor([int(number)])
        dist.broadcast(said, group=self._peers, group_src=0)
        return int(said)

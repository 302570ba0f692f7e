"""ActorWorker: generates samples and learns from them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.algorithms import (
    DistillationObjective,
    PolicyObjective,
    PreferenceObjective,
    TokenLoss,
    negative_log_likelihood,
)
from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.config.schema import (
    ActorConfig,
    CacheConfig,
    EnvironmentConfig,
    OptimizerConfig,
    RolloutConfig,
)
from hybridrl.controller import (
    FIRST_RANK,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    UPDATE,
    UPDATE_PAIRS,
    PartialTable,
    WorkerContext,
    any_column,
    transfer,
)
from hybridrl.controller.worker import Rendezvous
from hybridrl.engine.hybrid_engine import HybridEngine
from hybridrl.engine.train_engine import LossFunction
from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh
from hybridrl.parallel import process_group
from hybridrl.parallel.collectives import make_own_group
from hybridrl.rollout import SamplingSettings
from hybridrl.system.dtypes import DTYPES
from hybridrl.system.locations import parse_location
from hybridrl.weights.weight_channel import WeightChannel
from hybridrl.workers.generation import (
    GENERATED_COLUMNS,
    GENERATION_COUNT_FILE,
    SAMPLE_COLUMNS,
    UPDATE_COLUMNS,
    SampleSeeds,
    add_policy_version,
    is_generation_input,
    keeps_prompts_whole,
    list_continued_columns,
    list_optional_columns,
    report_generation,
    report_weights_received,
    report_weights_sent,
)
from hybridrl.workers.log_prob_cache import LogProbCache
from hybridrl.workers.model_worker import TrainedModelWorker
from hybridrl.workers.rollout_engines import build_rollout_engine, find_trained_shapes, setup_of
from hybridrl.workers.training_engines import ModelSource, build_policy_engine


def _list_update_columns(built: Mapping[str, Any]) -> list[str]:
    """Return the columns that updates need in workers built with these keywords."""
    config: ActorConfig = built.get("config", ActorConfig())
    limited = config.max_kl is not None and config.step_updates > 1
    needs = getattr(built["objective"], "needs", ())
    return [*UPDATE_COLUMNS, *needs, *(["log_probs"] if limited else [])]


def _list_drawn_columns(built: Mapping[str, Any]) -> list[str]:
    """Return the columns that say how samples were drawn, which the forwards of these workers
    repeat: which experts took each token, and what it was chosen from."""
    return [KEPT_SETS, *([ROUTED_EXPERTS] if built["rollout"].routing_replay else [])]


class ActorWorker(TrainedModelWorker):
    """One rank of the policy: a shard for training, a replica (or a slice of one) for generation.

    Args:
        source: The model.
        config: Training.
        rollout: Generation.
        objective: The loss of `update_actor` or `update_preference`.
        temperature: At which responses are scored and learned from.
        updates: Optimizer steps of the whole job, for the schedule.
        job: A name that no other job on this machine has.
        generates: Whether a rollout engine is needed.
        environment: What plays the samples; None, or without a name: nothing does.
        cache: Of `compute_ref_log_prob`; None: there is none.
    """

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        config: ActorConfig,
        rollout: RolloutConfig,
        objective: LossFunction,
        temperature: float,
        updates: int,
        job: str,
        generates: bool = True,
        environment: EnvironmentConfig | None = None,
        cache: CacheConfig | None = None,
    ) -> None:
        super().__init__(context, source)
        self._config = config
        self._objective = objective
        self._updates = updates
        self._temperature = temperature
        self._step_is_over = False
        self._rollout = rollout
        self._seeds = SampleSeeds(source.seed)
        share = rollout.parallel.ranks if generates else 1
        mesh = RankMesh({"rollout_dp": context.world_size // share, "rollout_tp": share})
        self._rollout_place = mesh.coordinates(context.rank)
        train = build_policy_engine(context, source, config, rollout_tp=share)
        self.model_engine = train
        train.start_optimizer(config.optimizer, updates)
        self._cache = LogProbCache(cache, train, source, temperature)
        engine = None
        if generates:
            coming = find_trained_shapes(source, train)
            engine = build_rollout_engine(
                source,
                rollout,
                setup_of(source, train.device, source.seed, job, coming=coming, sleeps=True),
                environment=environment,
                context=context,
                peers=make_own_group(mesh.groups("rollout_tp")),
            )
        self._engine = HybridEngine(
            train, engine, self.phase, source.dtype, verify=rollout.verify_weights
        )

    def coordinates(self) -> Mapping[str, MeshCoordinate]:
        return {**super().coordinates(), **self._rollout_place}

    def enter(self) -> None:
        if self._engine.is_generating:
            process_group.enter_world(self.context.role)
        else:
            super().enter()

    @transfer(
        THREE_D_ALL_MICRO_DP,
        reads=("prompt_ids",),
        may_read=is_generation_input,
        makes=GENERATED_COLUMNS,
        may_make=list_optional_columns,
        copies_together=keeps_prompts_whole,
        follows=list_continued_columns,
    )
    def generate_sequences(self, batch: Batch, sampling: SamplingSettings, parts: int = 1) -> Batch:
        """Generate one response for each row: `response_ids`, `response_mask`, `rollout_log_probs`,
        `finish_reason`, `policy_version`; of episodes also the columns of `episode_batch`.

        Args:
            parts: Return those that have finished first, about one of so many parts;
                `take_sequences` returns the others.
        """
        assert self.rows is not None and self._engine.rollout is not None
        seeds = self._seeds.next(self.rows, sampling.series)
        if parts > 1 or sampling.partial is not None:
            self._engine.begin(batch, sampling, seeds)
            report_weights_received(self, self._engine.cost)
            self._rows, self._total = self.rows, self.table_rows
            self._begun = None if sampling.partial is None else batch
            return self._take(0, parts)
        samples = self._engine.generate(batch, sampling, seeds)
        report_weights_received(self, self._engine.cost)
        report_generation(self, self._engine.rollout, samples)
        return samples

    @transfer(THREE_D_ALL_MICRO_DP, makes=GENERATED_COLUMNS, may_make=list_optional_columns)
    def take_sequences(self, part: int, parts: int) -> Batch:
        """Return the samples that have finished since the last call, about one of `parts` of those
        that `generate_sequences` has begun; the last part has all that are left."""
        return self._take(part, parts)

    def _take(self, part: int, parts: int) -> Batch:
        assert self._engine.rollout is not None
        is_last, count = part == parts - 1, len(self._rows)
        samples, rows = self._engine.take(count if is_last else -(-count // parts), is_last)
        version, begun = self._engine.policy_version, self._begun
        samples = add_policy_version(samples, version, keeps_tokens=begun is not None)
        before = begun and begun.take(rows)
        report_generation(self, self._engine.rollout, samples, before, version)
        return PartialTable(samples, self._rows[rows], self._total)  # type: ignore[return-value]

    @transfer(
        THREE_D,
        reads=SAMPLE_COLUMNS,
        follows=_list_drawn_columns,
        makes=("log_probs", "entropy"),
    )
    def compute_log_prob(self, batch: Batch) -> Batch:
        """Compute the `log_probs` of the responses under the current policy, and the `entropy`."""
        with self.phase("score"):
            return self.model_engine.forward(batch, temperature=self._temperature)

    @transfer(THREE_D, reads=SAMPLE_COLUMNS, follows=(KEPT_SETS,), makes=("ref_log_probs",))
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        """`ref_log_probs` of the responses under the model before training: with LoRA the
        actor is its own reference."""
        with self.phase("score"), self.model_engine.untrained():
            scored = self._cache.score(self, batch)
        return Batch.from_columns({"ref_log_probs": scored})

    @transfer(UPDATE, reads=_list_update_columns, may_read=any_column, follows=_list_drawn_columns)
    def update_actor(self, batch: Batch, goes_on: bool = False) -> dict[str, float]:
        """Take one optimizer step on the objective, and return the metrics of the whole mini-batch.

        Args:
            goes_on: Whether it is a further update of a step, on samples of the same policy:
                `actor.max_kl` limits how far the policy may be from that, and ends the step.

        Raises:
            ConfigError: if the job's loss is one of pairs.
            DataError: if a column that the loss reads is missing; names it.
        """
        if isinstance(self._objective, PreferenceObjective):
            raise ConfigError(
                f"{self.context.role}.update_actor learns from samples and their advantages, but "
                f"the loss of this job is one of pairs (preference.loss={self._objective.loss}). "
                "Call update_preference, or leave `preference` out of the settings."
            )
        self._step_is_over &= goes_on
        if self._step_is_over:
            self._engine.leave_out_update()
            return {"updates": 0.0}
        self._report_age(batch)
        asked = (
            self._objective.options if isinstance(self._objective, DistillationObjective) else {}
        )
        limit = self._config.max_kl
        metrics = self._engine.update(
            batch,
            self._objective,
            temperature=self._temperature,
            limits={} if limit is None or not goes_on else {"step_kl": limit},
            **asked,
        )
        self._step_is_over = "over_step_kl" in metrics
        made = not self._step_is_over and not metrics["skipped_updates"]
        return metrics if limit is None else {**metrics, "updates": float(made)}

    @transfer(
        UPDATE_PAIRS,
        reads=_list_update_columns,
        may_read=any_column,
        follows=_list_drawn_columns,
    )
    def update_preference(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on pairs of rows, the chosen one first.

        Raises:
            ConfigError: if the job's loss is not one of pairs.
            DataError: if a column that the loss reads is missing; names it.
        """
        if isinstance(self._objective, PolicyObjective):
            raise ConfigError(
                f"{self.context.role}.update_preference learns from pairs, but the loss of this "
                f"job is one of samples (algorithm.policy_loss={self._objective.policy_loss}). "
                "Call update_actor, or choose a loss of pairs: algorithm=dpo."
            )
        return self._engine.update(
            batch, self._objective, rows_together=2, temperature=self._temperature
        )

    @transfer(UPDATE, reads=UPDATE_COLUMNS)
    def update_supervised(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step that makes the given responses likelier."""
        return self._engine.update(batch, _supervised_loss)

    @transfer(ONE_TO_ALL)
    def load_weights(self, folder: str) -> None:
        """Load the weights of a model folder that this model has too. The next generation uses
        them; the optimizer keeps its state (see `start_optimizer`)."""
        self._engine.load(Path(folder))

    @transfer(ONE_TO_ALL)
    def start_optimizer(self, config: OptimizerConfig | None, updates: int) -> None:
        """Start a phase with a fresh optimizer; None: the settings and length of the job."""
        settings = config or self._config.optimizer
        self.model_engine.start_optimizer(settings, updates or self._updates)

    @transfer(FIRST_RANK)
    def open_rendezvous(self) -> Rendezvous:
        """Open a socket on the first rank at which a generator can meet this group."""
        assert self.context.rendezvous is not None  # a generator apart has an executor of processes
        address = self.context.rendezvous.address
        if self.context.rank:  # only the first rank answers
            return Rendezvous(address, 0)
        self._listener = socket.create_server((address, 0))
        return Rendezvous(address, self._listener.getsockname()[1])

    @transfer(ONE_TO_ALL)
    def join_generator(
        self, rendezvous: Rendezvous, receivers: int, parcels: bool, weight_sync: str
    ) -> None:
        """Join a process group with the ranks of a generator, which come after those of this group.

        Args:
            parcels: To give them weights by `pack_weights`.
            weight_sync: As the setting `rollout.weight_sync`.
        """
        if self.context.rank == 0:
            rendezvous = replace(rendezvous, listener=self._listener)
        rank, size = self.context.rank, self.context.world_size + receivers
        group = process_group.join_world(
            "weights", rank, size, rendezvous, self.context.device_kind
        )
        self.enter()
        train, dtype = self._engine.train, DTYPES[self._source.dtype]
        self._channel = WeightChannel(
            group,
            dtype,
            train.device,
            train,
            verify=self._rollout.verify_weights,
            adapters=self._source.adapters is not None,
            parcels=parcels,
            method=weight_sync,
            refresh=self._rollout.weight_sync_refresh,
        )

    @transfer(ONE_TO_ALL)
    def send_weights(self) -> None:
        """Send the current weights to the generator."""
        with self.phase("sync"):
            report_weights_sent(self, self._channel.send(self._engine.policy_version))

    @transfer(ONE_TO_ALL)
    def forget_sent_weights(self) -> None:
        """Make the next weights that the generator gets independent of all that were sent
        before."""
        self._channel.restart()

    @transfer(THREE_D_ALL_MICRO_DP)
    def pack_weights(self, method: str | None = None) -> Batch:
        """Pack the current weights as parcels, for the generator's `load_weights`.

        Args:
            method: Of the sync; None: as is set.
        """
        with self.phase("sync"):
            packed = self._channel.pack(method)
        report_weights_sent(self, self._channel.cost)
        return _make_parcel_table(*packed)

    @transfer(THREE_D_ALL_MICRO_DP)
    def pack_whole_weights(self) -> Batch:
        """Pack the weights of the last `pack_weights` in full, without differences, for a generator
        that cannot apply these."""
        with self.phase("sync"):
            return _make_parcel_table(*self._channel.pack_whole())

    def counters(self) -> dict[str, int]:
        return {"policy_version": self._engine.policy_version}

    def beside(self) -> dict[str, Mapping[str, Any]]:
        if self._engine.rollout is None:
            return {}
        return {GENERATION_COUNT_FILE: {"generations": self._seeds.generations}}

    @transfer(ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        """Load the state of a saved actor, to continue where it stopped."""
        self.load_snapshot(folder)
        counters = load_training_state(self.model_engine, parse_location(folder))
        self._engine.resume(counters["policy_version"])
        if self._engine.rollout is not None:
            self._seeds.load(parse_location(folder))

    @transfer(ONE_TO_ALL)
    def policy_version(self) -> int:
        """Return the number of optimizer steps and weight loads so far."""
        return self._engine.policy_version

    def _report_age(self, batch: Batch) -> None:
        """Report how many updates the samples' policy is behind."""
        if "policy_version" not in batch or not len(batch):
            return
        behind = self._engine.policy_version - batch["policy_version"]
        oldest = int(behind.max())
        self.report(behind_sum=float(behind.sum()), behind_rows=len(batch), behind_max=oldest)

    def close(self) -> None:
        super().close()
        if self._engine.rollout is not None:
            self._engine.rollout.close()


def _make_parcel_table(parcels: Batch, numbers: range, total: int) -> Batch:
    table = PartialTable(parcels, np.asarray(numbers, dtype=np.int64), total)
    return table  # type: ignore[return-value]


def _supervised_loss(outputs, columns, segments) -> TokenLoss:  # type: ignore[no-untyped-def]
    return negative_log_likelihood(outputs["log_probs"])

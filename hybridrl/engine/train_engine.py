"""The training engine: forward, backward and optimizer steps of a sharded model. It knows no RL.

The loss is a function from `hybridrl.algorithms`; what it needs of each token comes as columns of
the batch. Every token carries its weight in the global loss (`loss_weights`), so any split into
ranks and micro-batches gives the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms import TokenLoss, TokenSegments
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.batch.call_record import NonFiniteValue
from hybridrl.batch.row_balancing import compute_row_costs
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.compress.dynamic_codes import BlockCodes
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.micro_batches import (
    TokenColumns,
    UpdateMetrics,
    pack_rows,
)
from hybridrl.engine.moment_storage import MomentStorage
from hybridrl.engine.optimizer import (
    ShardedGradients,
    find_non_finite_in_batch,
    find_non_finite_in_model,
    make_optimizer,
)
from hybridrl.engine.parameter_shards import ParameterShards
from hybridrl.engine.prompt_groups import MicroBatch, group_rows
from hybridrl.engine.sharded_model import ShardedModel
from hybridrl.errors import TrainingError
from hybridrl.models.expert_routing import (
    ExpertRouters,
    compute_router_metrics,
    compute_router_penalties,
)
from hybridrl.models.hidden_matrices import list_hidden_matrices
from hybridrl.models.model_shape import find_attention_length
from hybridrl.models.optimizer_states import WHOLE_MATRIX_OPTIMIZERS
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.packed_samples import PackedSamples, SampleLayout
from hybridrl.models.prompt_sharing_gain import find_least_saving
from hybridrl.models.prompt_trees import PromptTrees
from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.parallel.collectives import reduce_over
from hybridrl.parallel.fsdp import list_unit_parameters
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.parallel.sequence_parallel import SequenceParallel, check_rows_divisible
from hybridrl.quantization.rounded_matrix import seed_rounding
from hybridrl.system.device_traits import free_cached_memory, synchronize_device

MAX_SKIPPED_UPDATES = 20
"""So many updates in a row with gradients that are not finite are an error, also in programs that
nobody guards (`guard.most_skipped`)."""
LossFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], TokenSegments], TokenLoss]
"""(outputs of the model, columns of the batch, samples), packed `[tokens]`, to a loss per token.
Metrics are averaged over the tokens of `response_mask`; those named `*_by_row` have a value for
each sample, and are averaged over samples; of those named `*_max` the largest is taken."""


class TrainEngine(ShardedModel):
    """An engine that trains a sharded model, or only scores with it.

    Args:
        model: The model, float32, on the CPU or not read yet (on the meta device); it is cut and
            sharded in place.
        mesh: How the model and its batches are cut over the ranks. Those that differ in `dp` have
            different rows; all others get the same ones.
        dtype: Name of the precision of computation.
        config: Micro-batch budget, checkpointing, offload.
        files: Of a model that is not read yet: every rank reads what is left to it.

    Attributes:
        attention_length: Of the model, see `find_attention_length`.
        shares_prompts: Whether rows of a micro-batch may share a prompt, see `MicroBatch`.
        skipped_in_a_row: Updates whose gradients were not finite, since the last one that was.
        fault: Where the last of these had the first such number, as this rank saw it.
        optimizer_config: Of the phase that has begun last.
        hidden_matrices: Names of the parameters that Muon steps.
        rounding_seed: Of the stochastic rounding of a model that learns in 8 bits; each update
            draws anew from it, whatever was drawn before. None: nothing is rounded so.
    """

    def __init__(
        self,
        model: PackedModel,
        mesh: ParallelMesh,
        dtype: str,
        config: ActorConfig,
        files: TensorReader | None = None,
    ) -> None:
        check_rows_divisible(model.rows, mesh.size("ring") * mesh.size("ulysses"))
        self._least_saving = find_least_saving(config.share_prefixes, model)
        self.shares_prompts = self._least_saving is not None
        self._routing = ExpertRouters.of(model.inner)
        self.attention_length = find_attention_length(model.inner)
        super().__init__(model, mesh, dtype, config, files)
        self.fault: NonFiniteValue | None = None
        self.rounding_seed: int | None = None
        self._sequence = SequenceParallel.of(mesh)
        self._gradients = self._watch_gradients()
        moves = not config.offload_parameters and self.device.type != "cpu"
        self._hosts_moments = config.offload_optimizer and moves
        self._resting: MomentStorage | None = None
        self._offloads_all, self._is_offloaded = config.offload_between_calls and moves, False

    def start_optimizer(self, config: OptimizerConfig, updates: int) -> None:
        """Start a phase of `updates` optimizer steps with a fresh optimizer and schedule."""
        self._max_grad_norm = config.max_grad_norm
        self.skipped_in_a_row = 0
        self.optimizer_config = config
        self.hidden_matrices = frozenset(list_hidden_matrices(self.model.inner))
        parameters = dict(self.model.inner.named_parameters())
        shards = None
        if config.name in WHOLE_MATRIX_OPTIMIZERS:
            self._drop_gathered()
            shards = ParameterShards(parameters, self.cuts, self.mesh)
        self.optimizer, self.schedule = make_optimizer(
            parameters, config, updates, self.hidden_matrices, shards
        )
        self._resting = None
        if self._hosts_moments or config.moments != "float32":
            parts = list_unit_parameters(self.model)
            place = torch.device("cpu") if self._hosts_moments else self.device
            self._resting = MomentStorage(self.optimizer, parts, self.device, place, config.moments)

    def set_learning_rate(self, rate: float) -> None:
        """Set the highest rate of the schedule, from the next update on."""
        self.schedule.base_lrs = [rate] * len(self.optimizer.param_groups)
        self.set_schedule_position(self.schedule.last_epoch)

    def set_schedule_position(self, position: int) -> None:
        """Go on with the schedule from this update, with its rates."""
        # One step back and one forward, which sets the rates. The count is for torch's warnings.
        before = {"last_epoch": position - 1, "_step_count": position + 2}
        self.schedule.load_state_dict({**self.schedule.state_dict(), **before})
        self.schedule.step()

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory until `onload`. Only with
        `actor.offload_between_calls`."""
        if self._offloads_all and not self._is_offloaded:
            self.model._apply(self._to_host)
            self.forget_rounded()  # rounded copies are the device's memory, too
            self._move_optimizer(torch.device("cpu"))
            synchronize_device(self.device)
            free_cached_memory(self.device)
            self._is_offloaded = True

    def onload(self) -> None:
        """Move parameters and optimizer state back to the device. Call it before anything else."""
        if self._is_offloaded:
            self.model.to(self.device, non_blocking=True)
            if not self._hosts_moments:
                self._move_optimizer(self.device)
            self._is_offloaded = False

    def put_optimizer_away(self) -> None:
        """Store the optimizer's moments where and in the precision in which they are kept between
        steps (`actor.offload_optimizer`, `actor.optimizer.moments`)."""
        if self._resting is not None:
            self._resting.put_away()

    @torch.no_grad()
    def forward(self, batch: Batch, **options: Any) -> Batch:
        """Compute the model's outputs for the response tokens, a ragged column each.

        Args:
            options: Of the model's forward, such as `temperature`.

        Returns:
            Of a pipeline, the ranks of the last stage have the outputs; those of others hold NaN.
        """
        self.model.eval()
        responses = batch.ragged("response_ids")
        shapes = self.model.shapes(**options).items()
        count = len(responses.values)
        outputs = {name: torch.full((count, *shape), torch.nan) for name, shape in shapes}
        micro_batches = self._micro_batches(batch)
        samples = [self._pack(batch.take(one.rows), one.shared) for one in micro_batches]

        def keep(number: int, found: Mapping[str, Tensor]) -> None:
            rows = micro_batches[number].rows
            places = concatenate_ranges(responses.cu_seqlens[rows], responses.lengths[rows])
            whole = self._whole(found, samples[number])
            for name, kept in outputs.items():
                kept[places] = whole[name].cpu()

        self._score(samples, keep, options)
        self._drop_gathered()  # their memory is for others now
        return Batch.from_columns(
            {
                name: RaggedColumn(
                    values.flatten(), responses.cu_seqlens * math.prod(values.shape[1:])
                )
                for name, values in outputs.items()
            }
        )

    def update(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        rows_together: int = 1,
        limits: Mapping[str, float] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Run one optimizer step on the rows of all ranks together.

        Args:
            batch: This rank's rows, with `prompt_ids`, `response_ids`, `response_mask`,
                `loss_weights`, and the token columns that `loss` reads.
            loss: See `LossFunction`. With `actor.router_loss_weight` that of `ExpertRouters` is
                added.
            rows_together: So many neighbouring rows share a micro-batch: 2 for a loss of pairs.
            limits: Of metrics. An update with one above its limit makes no step, and returns only
                those, as `over_<name>`.
            options: Of the model's forward, such as `temperature`.

        Returns:
            Metrics of the global mini-batch, the same on every rank. `skipped_updates` is 1 if the
            gradient was not finite, so that the step was left out, in the schedule too, and 0
            otherwise.

        Raises:
            TrainingError: after `MAX_SKIPPED_UPDATES` such steps in a row.
        """
        self.model.train()
        if self.rounding_seed is not None:
            drawn = hash((self.rounding_seed, self.schedule.last_epoch)) % 2**62
            seed_rounding(self.device, drawn)
        gathered = UpdateMetrics()
        micro_batches = self._micro_batches(batch, rows_together)
        parts = [batch.take(one.rows) for one in micro_batches]
        packed = zip(parts, micro_batches, strict=True)
        samples = [self._pack(part, one.shared) for part, one in packed]
        self._balance_routers(samples, options)

        def value_of(number: int, outputs: Mapping[str, Tensor]) -> Tensor:
            outputs = self._whole(outputs, samples[number])
            columns = TokenColumns(parts[number], self.device)
            mask = columns["response_mask"].bool()
            segments = TokenSegments.from_cu_seqlens(samples[number].response_bounds, mask)
            token_loss = loss(outputs, columns, segments)
            value = torch.where(mask, token_loss.loss * columns["loss_weights"], 0.0).sum()
            gathered.add(value, token_loss.metrics, mask, segments.lengths > 0)
            return value

        if self._pipeline is not None:
            self._pipeline.train(
                self.model, samples, value_of, reduce_once=self._reduce_once, **options
            )
        else:
            for number, given in enumerate(samples):
                last = number == len(samples) - 1
                self.model.set_requires_gradient_sync(last or not self._reduce_once)
                value_of(number, self.model(given, **options)).backward()
        found = self._routed()
        has_outputs = self._pipeline is None or self._pipeline.is_last
        metrics = gathered.reduce(self.mesh.group("dp")) if has_outputs else {}
        if self._pipeline is not None:
            metrics = self._pipeline.from_last(metrics)
        metrics |= found
        over = self._exceeding(metrics, limits or {})
        if not over:
            metrics["grad_norm"] = self._step()
        if self._measured is not None:
            self._measured.after_update()
        if over:
            self.leave_out_update()
            return over
        if self.skipped_in_a_row:
            faults = (find_non_finite_in_batch(batch, gathered.loss), self.fault)
            self.fault = min(filter(None, faults), default=None)
        metrics["skipped_updates"] = float(self.skipped_in_a_row > 0)
        metrics["learning_rate"] = self.schedule.get_last_lr()[0]
        if not self.skipped_in_a_row:
            self.schedule.step()
        return metrics

    def leave_out_update(self) -> None:
        """Drop the gradients, and count an update in the schedule that is not made."""
        self.optimizer.zero_grad()
        self.schedule.step()

    def _exceeding(
        self, metrics: Mapping[str, float], limits: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics above their limits as `over_<name>`, for all ranks alike: where one
        rank's rounding differs, the ranks of a step must not."""
        if not limits:
            return {}
        found = torch.tensor([metrics[name] for name in limits], dtype=torch.float64).nan_to_num(0)
        reduce_over(self.mesh.group(), found, dist.ReduceOp.MAX)
        values = zip(limits.items(), found.tolist(), strict=True)
        return {f"over_{name}": value for (name, limit), value in values if value > limit}

    def _score(
        self,
        samples: list[PackedSamples],
        take: Callable[[int, Mapping[str, Tensor]], None],
        options: dict[str, Any],
    ) -> None:
        """Run the forwards of all micro-batches; `take` is called with the number of each and its
        outputs, in a pipeline on the last rank only."""
        if self._pipeline is not None:
            self._pipeline.score(self.model, samples, take, **options)
        else:
            for number, packed in enumerate(samples):
                take(number, self.model(packed, **options))

    def _pack(self, batch: Batch, shared: Tensor | None = None) -> PackedSamples:
        """Pack rows into samples for the model, or into this rank's part of them with sequence
        parallelism.

        Args:
            shared: See `MicroBatch`.
        """
        multiple, trees = self.model.multiple, None
        if shared is not None:
            columns = batch.ragged("prompt_ids"), batch.ragged("response_ids")
            lengths = (column.lengths for column in columns)
            trees = PromptTrees.of(*lengths, shared, self.device, multiple)
        samples = PackedSamples.of(batch, self.device, self.model.rows, multiple, trees)
        if self._sequence is None:
            return samples
        return self._sequence.split(samples, self.model.shift)

    def _whole(self, outputs: Mapping[str, Tensor], samples: PackedSamples) -> Mapping[str, Tensor]:
        """Return the model's outputs for all response tokens of a micro-batch."""
        return outputs if self._sequence is None else self._sequence.gather(outputs, samples)

    def _balance_routers(self, samples: list[PackedSamples], options: dict[str, Any]) -> None:
        """Prepare the routers for an update. With a balancing loss, each router's choices among its
        experts are first counted over all micro-batches and ranks."""
        if (routing := self._routing) is None:
            return
        if weight := self.config.router_loss_weight:
            routing.keep_balance(None)
            routing.count(self.device)
            with torch.no_grad():
                self._score(samples, lambda *_: None, options)
            counts = self._of_all(routing)
            routing.keep_balance(compute_router_penalties(counts, routing.chosen, weight))
        routing.count(self.device)

    def _routed(self) -> dict[str, float]:
        """Return the metrics of the routers' choices in an update."""
        if self._routing is None:
            return {}
        self._routing.keep_balance(None)
        return compute_router_metrics(self._of_all(self._routing), self._routing.chosen)

    def _of_all(self, routing: ExpertRouters) -> Tensor:
        """Sum the counts of the routers over all tokens and layers."""
        counted = reduce_over(self.mesh.group(), routing.counted())
        return counted.div_(self.mesh.size("tp"))  # its ranks have the same tokens

    def _watch_gradients(self) -> ShardedGradients:
        parameters = dict(self.model.inner.named_parameters())
        copies = {
            parameter: cut.copies() if (cut := self.cuts.get(name)) else self.mesh.size("tp")
            for name, parameter in parameters.items()
        }
        if (tied := getattr(self.model, "tied", None)) in parameters:
            copies[parameters[tied]] *= 2  # the first stage's and the last one's
        here = [(parameters[n], self.cuts.get(n)) for n in self._partial if n in parameters]
        return ShardedGradients(self.model, self.mesh, copies, here)

    def _micro_batches(self, batch: Batch, rows_together: int = 1) -> list[MicroBatch]:
        """Return the micro-batches within the token budget; equally many on every rank, because
        each is a round of collectives, and the costliest first on each, so that those of a round
        take about equally long. A rank with too few rows gets empty ones."""
        prompts = batch.lengths("prompt_ids")
        lengths = prompts + batch.lengths("response_ids")
        budget, setting = self.config.tokens_per_microbatch, "actor.tokens_per_microbatch"
        if self._sequence is not None:  # the budget is what one device takes
            budget, setting = budget * self._sequence.size, f"{setting} x sequence-parallel ranks"
        groups, is_shared = group_rows(batch, rows_together, budget, self._least_saving)
        tokens = lengths - prompts * is_shared
        is_padded = self.model.rows is SampleLayout.PADDED
        units = [
            int(len(rows) * tokens[rows].max() if is_padded else tokens[rows].sum())
            for rows in groups
        ]
        packed = pack_rows(units, budget, setting=setting, padded=is_padded, groups=groups) or [[]]
        mine = torch.tensor([len(packed)])
        count = int(reduce_over(self.mesh.group("dp"), mine, dist.ReduceOp.MAX))
        while len(packed) < count:
            fullest = max(packed, key=len)
            packed.remove(fullest)
            packed += [fullest[::2], fullest[1::2]]
        costs = compute_row_costs(lengths, self.attention_length)
        costs -= compute_row_costs(prompts, self.attention_length) * is_shared
        rows_of = [[row for unit in units for row in groups[unit]] for units in packed]
        rows_of.sort(key=lambda rows: -costs[rows].sum())
        shared = torch.from_numpy(is_shared)
        return [MicroBatch(rows, shared[rows] if shared[rows].any() else None) for rows in rows_of]

    def _step(self) -> float:
        """Clip the gradients, step and clear them; return their norm before clipping. A step with a
        non-finite gradient is skipped."""
        self._gradients.finish()
        norm = self._gradients.norm()
        self.skipped_in_a_row = 0 if math.isfinite(norm) else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise TrainingError(
                f"The gradients of {MAX_SKIPPED_UPDATES} updates in a row were not finite, so none "
                "of them changed the model. Look for infinite or missing values in the scores and "
                "advantages, or for a learning rate (actor.optimizer.learning_rate) that has sent "
                "the weights to infinity."
            )
        self.fault = None if math.isfinite(norm) else find_non_finite_in_model(self.model.inner)
        if math.isfinite(norm):
            if 0 < self._max_grad_norm < norm:
                self._gradients.scale(self._max_grad_norm / norm)
            (self._resting or self.optimizer).step()
            for gather in self._gathers:
                gather.weights_stepped()
        self.optimizer.zero_grad()
        return norm

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into pinned memory, which only a copy that does not block chooses. It is
        waited for: FSDP pads uneven shards on the host as soon as it has them."""
        copy = tensor.to("cpu", non_blocking=True)
        synchronize_device(self.device)
        return copy

    def _move_optimizer(self, device: torch.device) -> None:
        optimizer = getattr(self, "optimizer", None)  # a model that only scores has none
        for state in optimizer.state.values() if optimizer else ():
            for name, value in state.items():
                if isinstance(value, BlockCodes):
                    state[name] = value.to(device)
                elif isinstance(value, Tensor) and value.ndim:
                    state[name] = value.to(device, non_blocking=True)

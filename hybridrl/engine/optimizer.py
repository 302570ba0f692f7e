"""The optimizer of a model with its learning-rate schedule, and the gradients that it steps by."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import IN_COLUMN, IN_GRADIENT, IN_LOSS, IN_WEIGHT, NonFiniteValue
from hybridrl.config.model_schema import AUTO_SCHEDULE
from hybridrl.config.schema import OptimizerConfig
from hybridrl.engine.adafactor import Adafactor
from hybridrl.engine.muon import Muon
from hybridrl.engine.parameter_shards import ParameterShards
from hybridrl.models.optimizer_states import OPTIONS, make_user_optimizer, read_options
from hybridrl.parallel.collectives import reduce_over
from hybridrl.parallel.process_group import ParallelMesh, to_local
from hybridrl.parallel.tensor_parallel import ParameterCut


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    updates: int,
    hidden: Collection[str] = (),
    shards: ParameterShards | None = None,
) -> tuple[Optimizer, LambdaLR]:
    """Make the optimizer of the trained `parameters` and its schedule over `updates` steps.

    Biases and norms (one-dimensional parameters) are not decayed.

    Args:
        parameters: By name.
        hidden: Names of those that Muon steps, see `list_hidden_matrices`.
        shards: Of Muon and Adafactor: what each rank has of the parameters.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    own = [p for name, p in trained.items() if name in hidden and config.name == "muon"]
    chosen = set(own)
    others = [p for p in trained.values() if p not in chosen]
    groups = [
        *_group([p for p in others if p.ndim >= 2], config.weight_decay),
        *_group([p for p in others if p.ndim < 2], 0.0),
    ]
    if config.name not in OPTIONS:
        optimizer = make_user_optimizer(config, groups)
    elif config.name == "adafactor":
        assert shards is not None
        optimizer = Adafactor(groups, shards, lr=config.learning_rate, **read_options(config))
    else:
        options = read_options(config)
        # Fused: one pass over memory, a quarter of the time on CPUs.
        adamw: dict[str, Any] = {"betas": tuple(config.betas), "fused": True}
        if not own:
            optimizer = AdamW(groups, lr=config.learning_rate, **adamw)
        else:
            assert shards is not None
            matrices = _group(own, config.weight_decay)
            optimizer = Muon(matrices, groups, shards, adamw, lr=config.learning_rate, **options)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, updates))


def _group(parameters: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    return [{"params": parameters, "weight_decay": decay}] if parameters else []


def learning_rate_factor(step: int, config: OptimizerConfig, updates: int) -> float:
    """Return the multiple of the learning rate at update `step` (from 0).

    Rises linearly over `warmup_steps`, the first update already above 0; then stays, or falls to
    `min_ratio` at the last update and stays there. `inverse_sqrt` falls as far as it comes by then,
    and no further than `min_ratio`.
    """
    if config.schedule == AUTO_SCHEDULE:  # whoever searches sets the rate
        return 1.0
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        unit = max(1, warmup)
        return max(config.min_ratio, math.sqrt(unit / (unit + step - warmup)))
    span = max(1, updates - 1 - warmup)
    begin = warmup
    if config.schedule == "wsd":
        falling = min(span, max(1, round(config.falling_share * updates)))
        begin, span = warmup + span - falling, falling
    progress = min(1.0, max(0, step - begin) / span)
    is_cosine = config.schedule == "cosine"
    fall = (1 + math.cos(math.pi * progress)) / 2 if is_cosine else 1 - progress
    return config.min_ratio + (1 - config.min_ratio) * fall


class ShardedGradients:
    """The gradients of a sharded model after a backward.

    Args:
        model: Its parameters are sharded over `mesh.fsdp`.
        mesh: The ranks that train it.
        copies: By parameter, how many places of the mesh, beside FSDP's, hold the same elements;
            those not named: one.
        partial: Parameters whose gradient is to be summed over the tensor-parallel ranks that hold
            the same elements, each with its cut; None where all hold all.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        copies: dict[nn.Parameter, int],
        partial: list[tuple[nn.Parameter, ParameterCut | None]],
    ) -> None:
        self._mesh = mesh
        self._partial = partial
        self._by_copies: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in model.parameters():
            self._by_copies[copies.get(parameter, 1) * mesh.copies].append(parameter)

    def finish(self) -> None:
        """Sum partial gradients over the tensor-parallel ranks that hold the same elements."""
        group = self._mesh.group("tp")
        for parameter, cut in self._partial:
            if parameter.grad is None:
                continue
            local = to_local(parameter.grad)
            parts = [()] if cut is None else sorted(set(cut.bounds))
            mine = 0 if cut is None else parts.index(cut.mine)
            # All parts side by side: the ranks of each need no group of their own.
            sums = local.new_zeros(len(parts), *local.shape)
            sums[mine] = local
            dist.all_reduce(sums, group=group)
            local.copy_(sums[mine])

    def norm(self) -> float:
        """Compute the norm of the global gradient, which is the same on every rank. Every element
        counts once, however many ranks hold it."""
        total = torch.zeros((), dtype=torch.float64)
        for copies, parameters in self._by_copies.items():
            gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
            if gradients:
                total += torch.nn.utils.get_total_norm(gradients).double().cpu() ** 2 / copies
        return float(reduce_over(self._mesh.group(), total).sqrt())

    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        for parameters in self._by_copies.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    to_local(parameter.grad).mul_(factor)


def find_non_finite_in_batch(batch: Batch, loss: float) -> NonFiniteValue | None:
    """Return the first non-finite value in the rows that this rank learned from, or in their loss;
    None if all are finite.

    Args:
        loss: Of this rank's rows.
    """
    mask = batch["response_mask"].values.bool() if "response_mask" in batch else None
    for name in batch.columns:
        values = batch[name]
        is_ragged = isinstance(values, RaggedColumn)
        numbers = values.values if is_ragged else values
        if not isinstance(numbers, Tensor) or not numbers.is_floating_point():
            continue
        wrong = ~torch.isfinite(numbers)
        if is_ragged and mask is not None and len(mask) == len(wrong):
            wrong &= mask  # what is not learned from may be anything
        if wrong.any():
            place = int(wrong.nonzero()[0])
            if is_ragged:
                place = int(torch.searchsorted(values.cu_seqlens, place, right=True)) - 1
            return NonFiniteValue(
                IN_COLUMN, f"the column `{name}`, row {place} of its {len(batch)}"
            )
    return None if math.isfinite(loss) else NonFiniteValue(IN_LOSS, "its loss")


def find_non_finite_in_model(model: nn.Module) -> NonFiniteValue | None:
    """Return the first non-finite parameter that this rank holds, or else the first non-finite
    gradient; None if all are finite."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return NonFiniteValue(IN_WEIGHT, f"the weight `{name}` itself")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            return NonFiniteValue(IN_GRADIENT, f"the gradient of `{name}`")
    return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(to_local(tensor)).all())

"""AdamW with its learning-rate schedule, and the storage of its moments between steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import IN_COLUMN, IN_GRADIENT, IN_LOSS, IN_WEIGHT, NonFiniteValue
from hybridrl.config.schema import OptimizerConfig
from hybridrl.parallel.process_group import ParallelMesh, to_local
from hybridrl.parallel.tensor_parallel import ParameterCut
from hybridrl.system.device_traits import SideStream

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, updates: int
) -> tuple[AdamW, LambdaLR]:
    """Make an AdamW over `parameters` and its schedule over `updates` optimizer steps.

    Biases and norms (one-dimensional parameters) are not decayed.
    """
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=tuple(config.betas),
        fused=True,  # one pass over memory, a quarter of the time on CPUs
    )
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, updates))


def learning_rate_factor(step: int, config: OptimizerConfig, updates: int) -> float:
    """Return the multiple of the learning rate at update `step` (from 0).

    Rises linearly over `warmup_steps`, the first update already above 0; then stays, or falls to
    `min_ratio` at the last update and stays there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    span = max(1, updates - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
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
        group, index = self._mesh.group("tp"), self._mesh.index("tp")
        for parameter, cut in self._partial:
            if parameter.grad is None:
                continue
            local = to_local(parameter.grad)
            parts = [()] if cut is None else sorted(set(cut.bounds))
            mine = 0 if cut is None else parts.index(cut.bounds[index])
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
        if (group := self._mesh.group()) is not None:
            dist.all_reduce(total, group=group)
        return float(total.sqrt())

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


class MomentStorage:
    """A wrapper that steps an optimizer part by part. The moments of the next part are loaded while
    one is stepped, so that the device never holds the working copies of more than two parts.

    Args:
        optimizer: Of `parts`; what it remembers may lie anywhere before the first step.
        parts: Parameters that are stepped together.
        device: Where they are.
        place: Where moments rest.
        dtype: In what precision.

    Attributes:
        brought: Tensors that have been made ready for use so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Sequence[nn.Parameter]],
        device: torch.device,
        place: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._optimizer = optimizer
        self._parts = [set(part) for part in parts if part]
        self._device, self._place, self._dtype = device, place, dtype
        self._stream = SideStream(device)
        self.brought = 0

    def step(self) -> None:
        """Step all parts; their moments are stored again when it returns."""
        with self._stream:
            self._bring(0)
        for number, part in enumerate(self._parts):
            self._stream.join()
            with self._stream:
                self._bring(number + 1)
            with self._only(part):
                self._optimizer.step()
            self._stream.wait_for_current()
            with self._stream:
                self._put_away(part)
        self._stream.finish()

    def put_away(self) -> None:
        """Store the moments that are not stored yet."""
        self._stream.wait_for_current()
        with self._stream:
            for part in self._parts:
                self._put_away(part)
        self._stream.finish()

    def _bring(self, number: int) -> None:
        for part in self._parts[number : number + 1]:
            for state, name, value in self._moments(part):
                state[name] = value.to(self._device, torch.float32, non_blocking=True)
                self.brought += 1

    def _put_away(self, part: set[nn.Parameter]) -> None:
        for state, name, value in self._moments(part):
            # The host's memory is pinned, because the copy does not block.
            state[name] = value.to(self._place, self._dtype, non_blocking=True)
            self._stream.reads(to_local(value))

    def _moments(self, part: set[nn.Parameter]) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
        for parameter in part:
            state = self._optimizer.state.get(parameter, {})
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.ndim:
                    yield state, name, value

    @contextmanager
    def _only(self, part: set[nn.Parameter]) -> Iterator[None]:
        """Restrict the optimizer to these parameters inside the block."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**group, "params": mine}
            for group in groups
            if (mine := [p for p in group["params"] if p in part])
        ]
        try:
            yield
        finally:
            self._optimizer.param_groups = groups

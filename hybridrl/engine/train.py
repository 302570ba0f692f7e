"""TrainEngine: forward, backward and optimizer steps of one model over a mesh. Knows no RL.

The loss is a function from `hybridrl.algorithms`; what it needs of each token comes as columns of
the batch. Every token carries its weight in the global loss (`loss_weights`), so any split into
ranks and micro-batches gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hybridrl.algorithms import Segments, TokenLoss
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.core.balance import pack
from hybridrl.core.batch import Batch, Ragged
from hybridrl.engine.optimizer import make_optimizer
from hybridrl.models import CausalPolicy, PackedSamples
from hybridrl.models.loading import DTYPES
from hybridrl.parallel.fsdp import is_small, shard

Loss = Callable[[Tensor, Tensor, Mapping[str, Tensor], Segments], TokenLoss]
"""(log_probs, entropy, token columns, samples), packed `[tokens]`, to a loss per token. Metrics are
averaged over the tokens of `response_mask`; of those named `*_max` the largest is taken."""


class TrainEngine:
    """Trains a sharded causal language model, or only scores with it.

    Args:
        policy: The model, float32, on the CPU; it is sharded in place.
        mesh: One-axis `dp` mesh over the ranks.
        device: This rank's device.
        dtype: Name of the precision of computation.
        config: Micro-batch budget, checkpointing, offload.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: str,
        config: ActorConfig,
    ) -> None:
        self.config = config
        self.device = device
        self.ranks = mesh.size()
        offload = config.offload_parameters and device.type != "cpu"
        if config.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        # Gathering gradients once per update, not per micro-batch, needs them whole in memory.
        self._reduce_once = is_small(policy)
        policy = policy if offload else policy.to(device)
        self.policy = shard(policy, mesh, DTYPES[dtype], offload=offload)
        self._offload_optimizer = config.offload_optimizer and not offload and device.type != "cpu"
        self._group = mesh.get_group()

    def start_optimizer(self, config: OptimizerConfig, updates: int) -> None:
        """Begins a phase of `updates` optimizer steps with a fresh optimizer and schedule."""
        self._max_grad_norm = config.max_grad_norm
        self.optimizer, self.schedule = make_optimizer(self.policy.parameters(), config, updates)

    @torch.no_grad()
    def forward(self, batch: Batch, temperature: float) -> Batch:
        """Log-probabilities of the response tokens: columns `log_probs` and `entropy`."""
        self.policy.eval()
        lengths = batch.lengths("response_ids")
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        log_probs, entropy = (torch.empty(int(bounds[-1])) for _ in range(2))
        for rows in self._micro_batches(batch):
            samples = PackedSamples.of(batch.take(rows), self.device)
            found = [column.cpu() for column in self.policy(samples, temperature)]
            start = 0
            for row in rows:
                length = int(lengths[row])
                place = slice(int(bounds[row]), int(bounds[row + 1]))
                log_probs[place] = found[0][start : start + length]
                entropy[place] = found[1][start : start + length]
                start += length
        cu_seqlens = torch.from_numpy(bounds)
        return Batch.from_columns(
            {"log_probs": Ragged(log_probs, cu_seqlens), "entropy": Ragged(entropy, cu_seqlens)}
        )

    def update(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on the rows of all ranks together.

        Args:
            batch: This rank's rows, with `prompt_ids`, `response_ids`, `response_mask`,
                `loss_weights`, and the token columns that `loss` reads.
            loss: See `Loss`.

        Returns:
            Metrics of the global mini-batch, the same on every rank.
        """
        self.policy.train()
        self._move_optimizer(self.device)
        gathered = _Metrics()
        micro_batches = self._micro_batches(batch)
        for number, rows in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            self.policy.set_requires_gradient_sync(last or not self._reduce_once)
            part = batch.take(rows)
            samples = PackedSamples.of(part, self.device)
            log_probs, entropy = self.policy(samples, temperature)
            columns = token_columns(part, self.device)
            mask = columns["response_mask"].bool()
            segments = Segments.from_cu_seqlens(samples.response_bounds.to(self.device), mask)
            token_loss = loss(log_probs, entropy, columns, segments)
            value = torch.where(mask, token_loss.loss * columns["loss_weights"], 0.0).sum()
            # FSDP averages gradients over ranks; the weights already are those of the global loss.
            (value * self.ranks).backward()
            gathered.add(value, token_loss.metrics, mask)
        metrics = gathered.reduce(self._group)
        metrics["grad_norm"] = self._step()
        metrics["learning_rate"] = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self._move_optimizer(torch.device("cpu"))
        return metrics

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, under its checkpoint name, one at a time. Collective."""
        for name, parameter in self.policy.model.named_parameters():
            whole = parameter.detach()
            if isinstance(whole, DTensor):
                whole = whole.to(self.device).full_tensor()
            yield name, whole

    def save(self, folder: Path) -> None:
        """Writes the model as a Hugging Face folder, in float32. Collective; rank 0 writes."""
        state = {name: tensor.cpu() for name, tensor in self.full_parameters()}
        if dist.get_rank(self._group) == 0:
            self.policy.model.save_pretrained(folder, state_dict=state)
        dist.barrier(self._group)

    def _micro_batches(self, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch within the token budget; equally many on every rank, because
        each is a round of collectives. A rank that has too few rows gets empty ones."""
        lengths = (batch.lengths("prompt_ids") + batch.lengths("response_ids")).tolist()
        packed = pack(lengths, self.config.tokens_per_microbatch) or [[]]
        count = torch.tensor([len(packed)])
        dist.all_reduce(count, dist.ReduceOp.MAX, group=self._group)
        while len(packed) < int(count):
            fullest = max(packed, key=len)
            packed.remove(fullest)
            packed += [fullest[::2], fullest[1::2]]
        return packed

    def _step(self) -> float:
        """Clips, steps and clears the gradients; gives their norm before clipping. A step whose
        gradient is not finite is left out."""
        parameters = list(self.policy.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            if self._max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _move_optimizer(self, device: torch.device) -> None:
        if not self._offload_optimizer:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.to(device)


def token_columns(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Every numeric column as `[response tokens]` on the device: token-level columns as they are,
    per-sample numbers repeated over the sample's tokens."""
    lengths = torch.from_numpy(batch.lengths("response_ids"))
    columns = {}
    for name in batch.columns:
        values = batch[name]
        if isinstance(values, Tensor):
            columns[name] = values.repeat_interleave(lengths).to(device)
        elif isinstance(values, Ragged) and torch.equal(values.lengths, lengths):
            columns[name] = values.values.to(device)
    return columns


class _Metrics:
    """Sums over micro-batches, then over ranks, in one small collective each for sum and max."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._tops: dict[str, Tensor] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor], mask: Tensor) -> None:
        self._add("loss", loss.detach())
        self._add("tokens", mask.sum())
        for name, values in metrics.items():
            if name.endswith("_max"):
                top = values.masked_fill(~mask, 0.0).max() if len(values) else values.new_zeros(())
                self._tops[name] = torch.maximum(self._tops.get(name, top), top)
            else:
                self._add(name, torch.where(mask, values, 0.0).sum())

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        sums = torch.tensor([float(v) for v in self._sums.values()], dtype=torch.float64)
        dist.all_reduce(sums, group=group)
        found = dict(zip(self._sums, sums.tolist(), strict=True))
        tokens = max(1.0, found["tokens"])
        result = {k: v if k in ("loss", "tokens") else v / tokens for k, v in found.items()}
        if self._tops:
            tops = torch.tensor([float(v) for v in self._tops.values()], dtype=torch.float64)
            dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
            result |= dict(zip(self._tops, tops.tolist(), strict=True))
        return result

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

"""Sequence parallelism: the tokens of a packed micro-batch are split over ranks by Ulysses and a
ring together.

All ranks of a sequence-parallel group get the same samples. Each runs the model on its own tokens
(`parallel.zigzag` says which); only attention needs those of others. Between the ranks of a Ulysses
group tokens are exchanged for heads, and the rings go across these groups. What the model says of
each response token, a few numbers, is then gathered, and every rank works out the same loss. A
rank's gradients are those of its tokens: the sum over the group is the whole gradient.

What is sent: see `ulysses` (whose tokens are those of one ring rank) and `ring_attention` (whose
key-value heads are those of one Ulysses rank), for every layer, and once
`gather_response_tokens`: 4 bytes times the response tokens of the rank that has most, for each
number and each other rank.

Source: "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI" (Fang and
Zhao, 2024).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import ConfigError
from hybridrl.models.linear_map import apply_linear_map
from hybridrl.models.packed_attention import causal_attention
from hybridrl.models.packed_samples import PackedSamples, PackingMetadata, SampleLayout
from hybridrl.models.teacher_kl import TopTokens
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.parallel.ring_attention import RingPlan, ring_attention
from hybridrl.parallel.ulysses import HeadExchange
from hybridrl.parallel.zigzag import compute_rank_positions, split_bounds, split_over_ring


class SequenceParallel:
    """A group of ranks that share the tokens of each micro-batch. Building it is collective.

    Args:
        mesh: Its `ring` and `ulysses` axes are neighbours, `ulysses` the inner one.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.ring, self.ulysses = mesh.size("ring"), mesh.size("ulysses")
        self._ring_group, self._ulysses_group = mesh.group("ring"), mesh.group("ulysses")
        self._group = mesh.group("ring", "ulysses")
        self._ring_rank = mesh.index("ring")
        self._rank = self._ring_rank * self.ulysses + mesh.index("ulysses")
        assert self._rank == dist.get_rank(self._group)
        if self._ring_group is not None:
            # NCCL wants all ranks in the first message of a group; in a ring some may have nothing.
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=self._ring_group)

    @classmethod
    def of(cls, mesh: ParallelMesh) -> SequenceParallel | None:
        """Build the sequence parallelism of a mesh; None if the mesh does not split sequences."""
        return None if mesh.group("ring", "ulysses") is None else cls(mesh)

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self.ring * self.ulysses

    def split(self, samples: PackedSamples, shift: int = 0) -> PackedSamples:
        """Return this rank's part of a packed micro-batch that every rank of the group has.

        Args:
            shift: So many places after a token's predictor the model says something of the token
                (see `PackedModel.shift`).

        Returns:
            This rank's tokens, and those response tokens that the model reads there. A rank
            without tokens gets one that nobody sees or reads, for no model runs on none.
            `response_bounds` and the packing's bounds stay those of the whole.
        """
        device = samples.input_ids.device
        cu_seqlens = samples.packing.cu_seqlens.to("cpu", torch.int64)
        rows = split_over_ring(cu_seqlens, self.ring)
        places = compute_rank_positions(rows, self.ulysses)
        mine = places[self._rank]
        read_at = samples.places if shift else samples.predictors
        reading = TokenOwnership.of(read_at.cpu(), places, self._rank, device)
        exchange = plan = None
        if self.ulysses > 1:
            bounds = split_bounds(len(rows[self._ring_rank].places), self.ulysses)
            counts = torch.tensor(bounds).diff().tolist()
            exchange = HeadExchange(self._ulysses_group, counts)
        if self.ring > 1:
            plan = RingPlan.of(self._ring_group, rows, device, samples.packing.trees)
        positions = samples.packing.position_ids(samples.input_ids.numel()).cpu()
        held = LocalTokens(
            tokens=len(mine),
            position_ids=_pad_empty(positions[mine]).to(device),
            packing=samples.packing,
            reading=reading,
            exchange=exchange,
            plan=plan,
        )
        return PackedSamples(
            input_ids=_pad_empty(samples.input_ids[0, mine.to(device)])[None],
            packing=dataclasses.replace(
                samples.packing,
                split=held,
                real=_select_local(samples.packing.real, mine.to(device), 0),
                routes=_select_local(samples.packing.routes, mine.to(device), -1),
            ),
            predictors=reading.local,
            places=reading.local,
            targets=samples.targets[reading.mine],
            response_bounds=samples.response_bounds,
            candidates=samples.candidates
            and TopTokens(*(part[reading.mine] for part in samples.candidates)),
            kept=samples.kept and samples.kept.select(reading.mine),
        )

    def gather(self, outputs: dict[str, Tensor], samples: PackedSamples) -> dict[str, Tensor]:
        """Gather the model's outputs for all response tokens of the micro-batch, in their original
        order. Collective; in the backward each rank takes the gradient of its own part.

        Args:
            outputs: Of the model for `samples`, `[this rank's response tokens]` or `[this rank's
                response tokens, numbers]` each.
            samples: What `split` gave.
        """
        held = samples.packing.split
        assert isinstance(held, LocalTokens)
        columns = [x if x.ndim > 1 else x[:, None] for x in outputs.values()]
        gathered = gather_response_tokens(torch.cat(columns, 1), held.reading, self._group)
        parts = gathered.split([x.shape[1] for x in columns], dim=1)
        named = zip(outputs.items(), parts, strict=True)
        return {name: part.squeeze(1) if x.ndim == 1 else part for (name, x), part in named}


@dataclasses.dataclass(frozen=True, eq=False)
class LocalTokens:
    """The tokens of a packed row that this rank holds; implements
    `hybridrl.models.packed_samples.SequenceShard`.

    Attributes:
        tokens: How many.
        position_ids: Their positions in their samples; a 0 if there are none.
        packing: Of the whole row.
        reading: Which response tokens are read on which rank.
        exchange: Of tokens for heads; None without Ulysses.
        plan: Of the ring; None without one.
    """

    tokens: int
    position_ids: Tensor
    packing: PackingMetadata
    reading: TokenOwnership
    exchange: HeadExchange | None
    plan: RingPlan | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Compute causal attention inside the samples, `[this rank's tokens, heads, head_dim]` in
        and out; k and v have the key-value heads. Collective, forward and backward."""
        real = [x[: self.tokens] for x in (q, k, v)]
        heads = q.shape[1]
        if self.exchange:
            qkv = self.exchange.to_heads(*real)
            heads //= len(self.exchange.counts)
        else:
            qkv = torch.cat(real, dim=1)
        if self.plan:
            check_ring_window(window)
            out = ring_attention(qkv, heads, self.plan, scale or q.shape[-1] ** -0.5)
        else:  # the exchange has brought this rank the whole row
            key_value_heads = (qkv.shape[1] - heads) // 2
            parts = qkv.split([heads, key_value_heads, key_value_heads], dim=1)
            out = causal_attention(*parts, self.packing, scale, window)
        out = self.exchange.to_tokens(out) if self.exchange else out
        return out if self.tokens else torch.cat([out, torch.zeros_like(q)])


def check_ring_window(window: int | None) -> None:
    """Raise `ConfigError` for attention windows, which a ring of several ranks does not support.

    Args:
        window: Tokens that a query sees, if fewer than the longest sample has.
    """
    if window is not None:
        raise ConfigError(
            f"The model's attention has windows of {window} tokens, shorter than the longest "
            "sample, which ring attention cannot do. Use `actor.parallel.ulysses` in place of "
            "`actor.parallel.ring`, or turn the windows off in the model's configuration."
        )


def check_rows_divisible(rows: SampleLayout, ranks: int) -> None:
    """Raise `ConfigError` for a model whose samples cannot be split over several ranks."""
    if ranks > 1 and rows is SampleLayout.PADDED:
        raise ConfigError(
            "The model hands on states from token to token besides attention, by convolutions or "
            "recurrences, so its sequences cannot be divided over ranks. Set "
            "actor.parallel.ring=1 and actor.parallel.ulysses=1."
        )


def _select_local(of_tokens: Tensor | None, mine: Tensor, of_none: int) -> Tensor | None:
    """Return the rows of this rank's tokens, or one row of `of_none` for the placeholder of a rank
    without tokens."""
    if of_tokens is None:
        return None
    return of_tokens[mine] if len(mine) else of_tokens.new_full((1, *of_tokens.shape[1:]), of_none)


def _pad_empty(x: Tensor) -> Tensor:
    return x if len(x) else x.new_zeros(1)


@dataclass(frozen=True, eq=False)
class TokenOwnership:
    """A map from response tokens to the rank whose outputs contain them.

    Attributes:
        mine: int64, the response tokens of this rank, ascending.
        local: Where among this rank's tokens each of them is read.
        most: Response tokens of the rank that has most of them.
        slots: `[response tokens]`: each one's place when the ranks' parts, padded to `most`,
            follow each other.
    """

    mine: Tensor
    local: Tensor
    most: int
    slots: Tensor

    @classmethod
    def of(
        cls, read_at: Tensor, places: list[Tensor], rank: int, device: torch.device
    ) -> TokenOwnership:
        """Build the map for response tokens read at `read_at` in the packed row, whose positions on
        each rank are `places`; both on the CPU."""
        counts = torch.tensor([len(held) for held in places])
        order = torch.cat(places)
        owners, locals_ = torch.empty_like(order), torch.empty_like(order)
        owners[order] = torch.arange(len(places)).repeat_interleave(counts)
        locals_[order] = torch.cat([torch.arange(len(held)) for held in places])
        owner = owners[read_at]
        read = owner.bincount(minlength=len(places))
        most = int(read.max())
        by_owner = owner.argsort(stable=True)
        number = torch.arange(len(owner)) - (read.cumsum(0) - read)[owner[by_owner]]
        slots = torch.empty_like(owner)
        slots[by_owner] = owner[by_owner] * most + number
        mine = (owner == rank).nonzero().squeeze(1)
        return cls(mine.to(device), locals_[read_at[mine]].to(device), most, slots.to(device))


def gather_response_tokens(
    values: Tensor, reading: TokenOwnership, group: dist.ProcessGroup
) -> Tensor:
    """Gather `[this rank's response tokens, numbers]` of every rank into `[response tokens,
    numbers]` in their original order. Collective; the backward is not: each rank takes the gradient
    of its own part, because all compute the same loss."""

    def gather(mine: Tensor) -> Tensor:
        padded = mine.new_zeros(reading.most, mine.shape[1])
        padded[: len(mine)] = mine
        gathered = mine.new_empty(dist.get_world_size(group) * reading.most, mine.shape[1])
        if reading.most:
            dist.all_gather(list(gathered.split(reading.most)), padded, group=group)
        return gathered.index_select(0, reading.slots)

    take = partial(torch.index_select, dim=0, index=reading.mine)
    return apply_linear_map(values, gather, take)

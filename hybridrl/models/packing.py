"""Packed samples: several in one row of tokens, with nothing between them and nothing padded."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from hybridrl.batch.batch import ROUTED_EXPERTS, TEACHER_IDS, TEACHER_LOG_PROBS, Batch, RaggedColumn
from hybridrl.errors import DataError
from hybridrl.models.teacher_kl import TopTokens

MAX_PADDING_RATIO = 1.25
"""Samples share an attention bucket while padded tokens stay within this multiple of real ones."""


class SampleLayout(enum.Enum):
    """How samples are laid out for a model; see `hybridrl.models.packing_trial`."""

    PACKED = "packed"
    """One after the other in one row, nothing padded."""
    PADDED = "padded"
    """Each in a row of its own, as long as the longest."""


class AttentionBucket(NamedTuple):
    """Samples of similar length, padded to the longest for kernels that need a rectangle.

    `source` `[real tokens]` are their places in the packed row, `target` their places in the
    flattened `[rows, longest]` rectangle.
    """

    rows: int
    longest: int
    source: torch.Tensor
    target: torch.Tensor


class SequenceShard(Protocol):
    """A rank's part of a packed row whose tokens several ranks hold together."""

    @property
    def position_ids(self) -> torch.Tensor:
        """The positions of this rank's tokens in their samples, `[tokens]`."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """As `models.packed_attention.causal_attention`, for this rank's tokens. Collective."""


@dataclass(frozen=True)
class PackingMetadata:
    """The bounds of the samples of a packed row, and what attention and routers need of them.

    Attributes:
        cu_seqlens: int32 `[samples + 1]`: sample i is `row[cu_seqlens[i]:cu_seqlens[i + 1]]`.
        longest: Tokens of the longest sample.
        buckets: For devices without a variable-length attention kernel; empty elsewhere.
        split: This rank's part of the row, if other ranks have the rest of it.
        real: `[tokens]`, which of this rank's tokens are those of samples.
        routes: `[tokens, experts chosen in all layers]` of this rank's tokens: the experts that are
            to take each of them, or -1 where the model chooses itself; None: everywhere.
    """

    cu_seqlens: torch.Tensor
    longest: int
    buckets: tuple[AttentionBucket, ...]
    split: SequenceShard | None = None
    real: torch.Tensor | None = None
    routes: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        device: torch.device,
        real: torch.Tensor | None = None,
        routes: torch.Tensor | None = None,
    ) -> PackingMetadata:
        """Build the metadata of samples with the bounds `cu_seqlens` `[samples + 1]`."""
        lengths = cu_seqlens.diff().tolist()
        buckets = tuple(_buckets(lengths, cu_seqlens.tolist())) if device.type == "cpu" else ()
        return cls(
            cu_seqlens.to(device, torch.int32),
            max(lengths),
            buckets,
            real=None if real is None else real.to(device),
            routes=None if routes is None else routes.to(device),
        )

    def position_ids(self, tokens: int) -> torch.Tensor:
        """Return positions that start at 0 in each sample, `[tokens]`; with `tokens` given, the
        host need not wait for an accelerator. So many there are, which the host would have to ask
        an accelerator for."""
        if self.split is not None:
            return self.split.position_ids
        lengths = self.cu_seqlens.diff()
        starts = self.cu_seqlens[:-1].repeat_interleave(lengths, output_size=tokens)
        return torch.arange(tokens, device=starts.device) - starts


@dataclass(frozen=True)
class PackedSamples:
    """The prompts and responses of a micro-batch as a model reads them.

    Attributes:
        input_ids: `[rows, tokens]`: one row with prompt and response of each sample in turn, or a
            row for each sample, with zeros after it.
        packing: Bounds of the samples, or of the rows, all rows one after the other.
        predictors: `[response tokens]`: the place, in all rows one after the other, whose output
            predicts each response token.
        targets: `[response tokens]`: the response tokens, in the order of the batch's own column.
        response_bounds: `[samples + 1]`: bounds of the samples in `targets`.
        candidates: What a teacher expected in the place of each response token.
    """

    input_ids: torch.Tensor
    packing: PackingMetadata
    predictors: torch.Tensor
    targets: torch.Tensor
    response_bounds: torch.Tensor
    candidates: TopTokens | None = None

    @classmethod
    def of(
        cls, batch: Batch, device: torch.device, rows: SampleLayout = SampleLayout.PACKED
    ) -> PackedSamples:
        """Lay out all rows of `batch` (columns `prompt_ids`, `response_ids`, and `routed_experts`,
        `teacher_ids` and `teacher_log_probs` if it has them).

        A batch without rows gives one token that predicts nothing: no model runs on no tokens, and
        a rank without rows still takes part in its peers' collectives.
        """
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        bounds = prompts.cu_seqlens + responses.cu_seqlens
        bounds = bounds if len(batch) else torch.tensor([0, 1])
        if rows is SampleLayout.PADDED:
            bounds = torch.arange(len(bounds)) * bounds.diff().max()
        tokens = torch.zeros(int(bounds[-1]), dtype=torch.int64)
        starts = bounds[: len(batch)]
        prompt_places = _places(prompts, starts)
        response_places = _places(responses, starts + prompts.lengths)
        tokens[prompt_places] = prompts.values
        tokens[response_places] = responses.values
        real = torch.zeros(len(tokens), dtype=torch.bool)
        real[prompt_places] = real[response_places] = True
        routes = _routes(batch, starts, len(tokens)) if ROUTED_EXPERTS in batch.columns else None
        return cls(
            input_ids=tokens.view(1 if rows is SampleLayout.PACKED else len(starts) or 1, -1).to(
                device
            ),
            packing=PackingMetadata.of(bounds, device, real, routes),
            predictors=(response_places - 1).to(device),
            targets=responses.values.to(device, copy=True),  # a plain tensor
            response_bounds=responses.cu_seqlens,
            candidates=_candidates(batch, device) if TEACHER_IDS in batch.columns else None,
        )


def _candidates(batch: Batch, device: torch.device) -> TopTokens:
    """Read the teacher's columns, which must have equally many numbers for each response token."""
    tokens, found = batch.lengths("response_ids"), []
    for name in (TEACHER_IDS, TEACHER_LOG_PROBS):
        column = batch.ragged(name)
        width = len(column.values) // max(1, int(tokens.sum()))
        if not torch.equal(column.lengths, torch.from_numpy(tokens) * width):
            raise DataError(
                f"The column `{name}` does not have as many numbers for each response token: rows "
                f"of {column.lengths[:3].tolist()} for {tokens[:3].tolist()} tokens."
            )
        found.append(column.values.view(int(tokens.sum()), width).to(device, copy=True))
    return TopTokens(found[0].long(), found[1])


def _routes(batch: Batch, starts: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Place the column `routed_experts`, which lacks each sample's last token, into the row."""
    column = batch.ragged(ROUTED_EXPERTS)
    lengths = torch.from_numpy(batch.lengths("prompt_ids") + batch.lengths("response_ids")) - 1
    if not (count := int(lengths.sum())):
        return None
    width = len(column.values) // count
    if not torch.equal(column.lengths, lengths * width):
        raise DataError(
            f"The column `{ROUTED_EXPERTS}` does not have as many experts for each token but the "
            f"last of a sample: rows of {column.lengths[:3].tolist()} for {lengths[:3].tolist()} "
            "tokens."
        )
    found = torch.full((tokens, width), -1, dtype=torch.int32)
    shift = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    found[torch.arange(count) + shift] = column.values.view(count, width).to(torch.int32)
    return found


def _places(column: RaggedColumn, starts: torch.Tensor) -> torch.Tensor:
    """Return the place of each value of a ragged column whose rows begin at `starts`."""
    shift = (starts - column.cu_seqlens[:-1]).repeat_interleave(column.lengths)
    return torch.arange(len(column.values)) + shift


def _buckets(lengths: list[int], bounds: list[int]) -> list[AttentionBucket]:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    real = 0
    for i in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= MAX_PADDING_RATIO * (real + lengths[i]):
            groups[-1].append(i)
            real += lengths[i]
        else:
            groups.append([i])
            real = lengths[i]
    return [_bucket(sorted(group), lengths, bounds) for group in groups]


def _bucket(samples: list[int], lengths: list[int], bounds: list[int]) -> AttentionBucket:
    longest = max(lengths[i] for i in samples)
    source = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in samples])
    target = torch.cat([torch.arange(lengths[i]) + row * longest for row, i in enumerate(samples)])
    return AttentionBucket(len(samples), longest, source, target)

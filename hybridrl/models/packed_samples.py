"""Packed samples: several in one row of tokens with nothing between them and nothing padded."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from hybridrl.batch.batch import ROUTED_EXPERTS, TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.errors import DataError
from hybridrl.models.kept_tokens import KeptTokens
from hybridrl.models.prompt_trees import PromptTrees
from hybridrl.models.teacher_kl import TopTokens
from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.system.device_traits import copy_to_device

MAX_PADDING_RATIO = 1.25
"""Samples share an attention bucket while padded tokens stay within this multiple of real ones."""


class SampleLayout(enum.Enum):
    """A way to lay samples out for a model; see `hybridrl.models.packing_trial`."""

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

    @classmethod
    def of(cls, samples: list[int], lengths: torch.Tensor, device: torch.device) -> AttentionBucket:
        """Build the bucket of these samples of a row.

        Args:
            lengths: `[samples]`, of all samples of the row, on the CPU.
        """
        mine, starts = lengths[samples], (lengths.cumsum(0) - lengths)[samples]
        longest = int(mine.max())
        targets = torch.arange(len(samples)) * longest
        source, target = (
            copy_to_device(concatenate_ranges(x, mine), device) for x in (starts, targets)
        )
        return cls(len(samples), longest, source, target)


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
        """Return the attention of this rank's tokens; see `causal_attention`. Collective."""


@dataclass(frozen=True)
class PackingMetadata:
    """The bounds of the samples of a packed row, and what attention and routers need of them.

    Attributes:
        cu_seqlens: int32 `[samples + 1]`: sample i is `row[cu_seqlens[i]:cu_seqlens[i + 1]]`.
        longest: Tokens of the longest sample.
        lengths: int64 `[samples]`, on the CPU.
        split: This rank's part of the row, if other ranks have the rest of it.
        real: `[tokens]`, for each of this rank's tokens the number of samples that it belongs to.
        trees: The samples that share a prompt. Their prompt and each response stand for samples
            above; None: no prompt is shared.
        routes: `[tokens, experts chosen in all layers]` of this rank's tokens: the experts that are
            to take each of them, or -1 where the model chooses itself; None: everywhere.
    """

    cu_seqlens: torch.Tensor
    longest: int
    lengths: torch.Tensor
    split: SequenceShard | None = None
    real: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    trees: PromptTrees | None = None

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor,
        device: torch.device,
        real: torch.Tensor | None = None,
        routes: torch.Tensor | None = None,
        trees: PromptTrees | None = None,
    ) -> PackingMetadata:
        """Build the metadata of samples with the bounds `cu_seqlens` `[samples + 1]`."""
        lengths = cu_seqlens.diff()
        return cls(
            cu_seqlens.to(device, torch.int32),
            int(lengths.max()),
            lengths,
            real=None if real is None else real.to(device),
            routes=None if routes is None else routes.to(device),
            trees=trees,
        )

    @cached_property
    def buckets(self) -> tuple[AttentionBucket, ...]:
        """The samples in rectangles, for attention without a kernel for samples of any length. Made
        by the first layer that reads them, for all others."""
        groups = group_similar_samples(self.lengths[:, None].tolist())
        device = self.cu_seqlens.device
        return tuple(AttentionBucket.of(samples, self.lengths, device) for samples in groups)

    @cached_property
    def tree_parts(self) -> tuple[list[int], PackingMetadata, list[PackingMetadata]]:
        """The parts of a row with trees, see `PromptTrees.split_row`: their tokens, the samples
        that are no responses of trees, and the responses of each tree."""
        assert self.trees is not None
        sizes, lengths = self.trees.split_row()
        others, *trees = (
            PackingMetadata.of(F.pad(x.cumsum(0), (1, 0)), self.cu_seqlens.device) for x in lengths
        )
        return sizes, others, trees

    def position_ids(self, tokens: int) -> torch.Tensor:
        """Return positions that start at 0 in each sample, and behind its prompt in a response
        that shares one, `[tokens]`; with their number given, the host need not wait for an
        accelerator."""
        if self.split is not None:
            return self.split.position_ids
        lengths, starts = self.cu_seqlens.diff(), self.cu_seqlens[:-1]
        if self.trees is not None:
            starts = starts - copy_to_device(self.trees.offsets, starts.device)
        starts = starts.repeat_interleave(lengths, output_size=tokens)
        return torch.arange(tokens, device=starts.device) - starts


@dataclass(frozen=True)
class PackedSamples:
    """The prompts and responses of a micro-batch as a model reads them.

    Attributes:
        input_ids: `[rows, tokens]`: one row with prompt and response of each sample in turn, or a
            row for each sample, with zeros after it.
        packing: Bounds of the samples, or of the rows, all rows one after the other.
        predictors: `[response tokens]`: the place, in all rows one after the other, whose output
            predicts each response token. First tokens of responses that share a prompt have one.
        places: `[response tokens]`: the place of each response token itself.
        targets: `[response tokens]`: the response tokens, in the order of the batch's own column.
        response_bounds: `[samples + 1]`: bounds of the samples in `targets`.
        candidates: What a teacher expected in the place of each response token.
        kept: What each response token was chosen from; None: the whole vocabulary.
    """

    input_ids: torch.Tensor
    packing: PackingMetadata
    predictors: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    response_bounds: torch.Tensor
    candidates: TopTokens | None = None
    kept: KeptTokens | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        device: torch.device,
        rows: SampleLayout = SampleLayout.PACKED,
        multiple: int = 1,
        trees: PromptTrees | None = None,
    ) -> PackedSamples:
        """Lay out all rows of `batch` (columns `prompt_ids`, `response_ids`, and `routed_experts`,
        `teacher_ids`, `teacher_log_probs` and `kept_sets` if it has them). A sample that nobody
        reads makes the tokens of a packed row a multiple of a number. With `trees`, which are those
        of these rows, a prompt that rows share stands once in the packed row.

        A batch without rows gives one token that predicts nothing: no model runs on no tokens, and
        a rank without rows still takes part in its peers' collectives.
        """
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        bounds = prompts.cu_seqlens + responses.cu_seqlens
        bounds = bounds if len(batch) else torch.tensor([0, 1])
        if trees is not None:
            bounds = trees.bounds
        if rows is SampleLayout.PADDED:
            bounds = torch.arange(len(bounds)) * bounds.diff().max()
        elif lacking := -int(bounds[-1]) % multiple:
            bounds = torch.cat([bounds, bounds[-1:] + lacking])
        tokens = torch.zeros(int(bounds[-1]), dtype=torch.int64)
        starts = bounds[: len(batch)] if trees is None else trees.prompt_starts
        ends = starts + prompts.lengths
        prompt_places = concatenate_ranges(starts, prompts.lengths)
        response_places = concatenate_ranges(
            ends if trees is None else trees.response_starts, responses.lengths
        )
        predictors, has_tokens = response_places - 1, responses.lengths > 0
        predictors[responses.cu_seqlens[:-1][has_tokens]] = ends[has_tokens] - 1
        tokens[prompt_places] = prompts.values
        tokens[response_places] = responses.values
        real = torch.zeros(len(tokens), dtype=torch.int32)
        for places in (prompt_places, response_places):
            real.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        routes = _routes(batch, starts, len(tokens)) if ROUTED_EXPERTS in batch.columns else None
        count = 1 if rows is SampleLayout.PACKED else len(starts) or 1
        return cls(
            input_ids=tokens.view(count, -1).to(device),
            packing=PackingMetadata.of(bounds, device, real, routes, trees),
            predictors=predictors.to(device),
            places=response_places.to(device),
            targets=responses.values.to(device, copy=True),  # a plain tensor
            response_bounds=responses.cu_seqlens,
            candidates=_candidates(batch, device) if TEACHER_IDS in batch.columns else None,
            kept=KeptTokens.of(batch, device) if KEPT_SETS in batch.columns else None,
        )


def _candidates(batch: Batch, device: torch.device) -> TopTokens:
    """Read the teacher's columns."""
    tokens = torch.from_numpy(batch.lengths("response_ids"))
    ids, log_probs = (
        _read_by_token(batch, name, tokens, "numbers for each response token").to(device, copy=True)
        for name in (TEACHER_IDS, TEACHER_LOG_PROBS)
    )
    return TopTokens(ids.long(), log_probs)


def _routes(batch: Batch, starts: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Place the column `routed_experts`, which lacks each sample's last token, into the row."""
    lengths = torch.from_numpy(batch.lengths("prompt_ids") + batch.lengths("response_ids")) - 1
    if not lengths.sum():
        return None
    of_what = "experts for each token but the last of a sample"
    routes = _read_by_token(batch, ROUTED_EXPERTS, lengths, of_what).to(torch.int32)
    found = torch.full((tokens, routes.shape[1]), -1, dtype=torch.int32)
    found[concatenate_ranges(starts, lengths)] = routes
    return found


def _read_by_token(batch: Batch, name: str, tokens: torch.Tensor, of_what: str) -> torch.Tensor:
    """Read a column that has equally many numbers for each token, `[tokens, numbers]`.

    Args:
        tokens: Of each row.
        of_what: What there are as many of, for the message.
    """
    column, count = batch.ragged(name), int(tokens.sum())
    width = len(column.values) // max(1, count)
    if not torch.equal(column.lengths, tokens * width):
        raise DataError(
            f"The column `{name}` does not have as many {of_what}: rows of "
            f"{column.lengths[:3].tolist()} for {tokens[:3].tolist()} tokens."
        )
    return column.values.view(count, width)


def group_similar_samples(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Divide samples into few groups that are padded to the longest with little padding; see
    `MAX_PADDING_RATIO`.

    Args:
        lengths: By sample its length, or its lengths in several rows.

    Returns:
        Numbers of the samples of each group, ascending.
    """
    groups: list[list[int]] = []
    longest, real = list(lengths[0]), 0
    for sample in sorted(range(len(lengths)), key=lambda sample: -sum(lengths[sample])):
        mine = lengths[sample]
        together, tokens = list(map(max, longest, mine)), real + sum(mine)
        if groups and sum(together) * (len(groups[-1]) + 1) <= MAX_PADDING_RATIO * tokens:
            groups[-1].append(sample)
            longest, real = together, tokens
        else:
            groups.append([sample])
            longest, real = list(mine), sum(mine)
    return [sorted(group) for group in groups]

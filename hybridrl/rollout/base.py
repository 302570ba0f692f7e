"""RolloutEngine: what generates samples. Token ids in, token ids out."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import torch
from torch import Tensor

from hybridrl.core.batch import Batch, Ragged


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

    Attributes:
        max_tokens: Longest response.
        min_tokens: The end-of-sequence token is not chosen before this many.
        temperature: 0 is greedy.
        top_p, top_k: Nucleus and top-k; 1.0 and 0 switch them off.
        stop: Texts that end a response; the text itself stays in it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = field(default=())
    min_tokens: int = 0

    def greedy(self) -> Sampling:
        """The same limits, always the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


class RolloutEngine(ABC):
    """Generates with its own copy of the weights.

    The order of calls is `wake` (memory for weights), `load`, `generate`, `sleep`; an engine that
    cannot give memory back ignores `wake` and `sleep`.
    """

    @abstractmethod
    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Batch:
        """One response for each row of `prompt_ids`.

        Returns:
            Columns `response_ids`, `rollout_log_probs` (of the distribution sampled from) and
            `finish_reason` (`stop` or `length`).
        """

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes new weights: every parameter whole, under its checkpoint name."""

    def wake(self) -> None:  # noqa: B027 (an engine need not do it)
        """Takes back the memory for the weights."""

    def sleep(self) -> None:  # noqa: B027
        """Gives memory of weights and KV cache back, until `wake`."""

    def close(self) -> None:  # noqa: B027
        """Ends the engine."""


def responses(
    token_ids: list[list[int]], log_probs: list[list[float]], finish_reasons: list[str]
) -> Batch:
    """The batch that `RolloutEngine.generate` returns."""
    return Batch.from_columns(
        {
            "response_ids": _ragged(token_ids, torch.int64),
            "rollout_log_probs": _ragged(log_probs, torch.float32),
            "finish_reason": pa.array(finish_reasons, pa.string()),
        }
    )


def _ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Ragged:
    """Typed even where there are no rows."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])
    return Ragged(torch.tensor([x for row in rows for x in row], dtype=dtype), cu_seqlens)

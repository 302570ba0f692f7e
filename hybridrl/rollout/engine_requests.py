"""Requests to an engine that generates tokens, and the queue that takes them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch, RaggedColumn


@dataclass(frozen=True)
class SamplingSettings:
    """The options by which an engine samples the tokens of a response.

    Attributes:
        max_tokens: Longest response.
        min_tokens: No token that ends a response is chosen before this many.
        temperature: 0 is greedy.
        top_p, top_k: Nucleus and top-k; 1.0 and 0 switch them off.
        stop: Texts that end a response; the text itself stays in it.
        stop_token_ids: Tokens that end a response besides the model's own; they stay in it, too.
        series: Names what is drawn, such as an evaluation: its noise then depends on the name, and
            that of what is drawn without one on how often that was.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = field(default=())
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    series: str | None = None

    def greedy(self) -> SamplingSettings:
        """Return the same limits with the likeliest token at each place."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


class Request(NamedTuple):
    """A request for one turn of the model, or for several samples of it.

    Attributes:
        key: Of the caller's choice; no two samples under way may share one.
        prompt_ids: All tokens so far.
        sampling: Limits and distribution of this turn.
        seed: Of this request, so that what it samples does not depend on what runs beside it.
        samples: How many; the others have the keys and the seeds that follow.
    """

    key: int
    prompt_ids: list[int]
    sampling: SamplingSettings
    seed: int
    samples: int = 1


class EngineOutput(NamedTuple):
    """The output for one sample of a request: its tokens, log-probabilities and finish reason.
    `routes` if they are wanted."""

    key: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routes: npt.NDArray[Any] | None = None


class RequestQueue(ABC):
    """Takes requests one by one, and gives what became of them.

    Attributes:
        continuous: Whether requests that start while others are under way run beside them. If not,
            `poll` generates all that wait as one batch, and more of them are worth waiting for.
    """

    continuous: ClassVar[bool] = True

    @abstractmethod
    def start(self, request: Request) -> None:
        """Take a request; `poll` will give the outcome of each of its samples."""

    @abstractmethod
    def poll(self) -> list[EngineOutput]:
        """Work for a while on the requests under way, and return those that it finished."""

    @abstractmethod
    def abort(self, keys: Iterable[int]) -> None:
        """Drop these samples if they are under way: `poll` will not give them."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop all requests under way."""

    @abstractmethod
    def progress(self) -> dict[int, int]:
        """Return the number of tokens of each sample under way, by key."""

    def partial(self) -> dict[int, list[int]]:
        """Return the tokens so far of samples under way, by key, for those who want to see them as
        they come; none of an engine that cannot say."""
        return {}

    def refresh(self, refresh: Callable[[], int]) -> int:
        """Call a function that may bring new weights, and return their version."""
        return refresh()

    def end_call(self) -> None:  # noqa: B027 (only ranks that share an engine have to know)
        """Note that the caller asks for nothing until its own next call."""


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return the seed of each row; see `RolloutEngine.generate`."""
    return list(range(seed, seed + rows)) if isinstance(seed, int) else list(seed)


def requests_of(
    batch: Batch, sampling: SamplingSettings, seeds: Sequence[int]
) -> Iterator[Request]:
    """Yield the requests for a response to each row of `prompt_ids`, whose keys are the rows.

    Neighbouring rows of one prompt with consecutive seeds are samples of one request.
    """
    prompts = [row.tolist() for row in batch["prompt_ids"].rows()]
    rows = enumerate(zip(prompts, seeds, strict=True))
    for _, run in itertools.groupby(rows, lambda row: (row[1][0], row[1][1] - row[0])):
        (first, (ids, seed)), *others = run
        yield Request(first, ids, sampling, seed, 1 + len(others))


def finished_batch(
    done: Sequence[EngineOutput], routes_dtype: npt.DTypeLike | None = None
) -> Batch:
    """Return finished requests as rows; see `RolloutEngine.generate` for the columns."""
    return build_response_batch(
        [finished.token_ids for finished in done],
        [finished.log_probs for finished in done],
        [finished.finish_reason for finished in done],
        [finished.routes for finished in done if finished.routes is not None],
        routes_dtype,
    )


def build_response_batch(
    token_ids: list[list[int]],
    log_probs: list[list[float]],
    finish_reasons: list[str],
    routes: list[npt.NDArray[Any]] | None = None,
    routes_dtype: npt.DTypeLike | None = None,
) -> Batch:
    """Return the batch that `RolloutEngine.generate` gives; with `routed_experts` if these have a
    precision."""
    batch = Batch.from_columns(
        {
            "response_ids": ragged(token_ids, torch.int64),
            "rollout_log_probs": ragged(log_probs, torch.float32),
            "finish_reason": pa.array(finish_reasons, pa.string()),
        }
    )
    if routes is None or routes_dtype is None:
        return batch
    cu_seqlens = torch.tensor([0, *itertools.accumulate(row.size for row in routes)])
    values = np.concatenate([np.zeros(0, routes_dtype), *(row.reshape(-1) for row in routes)])
    return batch.with_columns({ROUTED_EXPERTS: RaggedColumn(torch.from_numpy(values), cu_seqlens)})


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> RaggedColumn:
    """Return a token-level column of these rows, typed even where there are none."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])
    return RaggedColumn(torch.tensor([x for row in rows for x in row], dtype=dtype), cu_seqlens)

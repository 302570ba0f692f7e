"""RolloutEngine: what generates samples. Token ids in, token ids out."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from hybridrl.batch.batch import ROUTES, Batch, Ragged
from hybridrl.rollout.weight_writer import Pieces, WeightWriter


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens.

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

    def greedy(self) -> Sampling:
        """The same limits, always the likeliest token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0)


class Request(NamedTuple):
    """A turn of the model to generate.

    Attributes:
        key: Of the caller's choice; no two samples under way may share one.
        prompt_ids: All tokens so far.
        sampling: Limits and distribution of this turn.
        seed: Of this request, so that what it samples does not depend on what runs beside it.
        samples: How many; the others have the keys and the seeds that follow.
    """

    key: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    samples: int = 1


class Finished(NamedTuple):
    """A generated turn: the `key` of its request, the tokens that the engine continued, and what
    `RolloutEngine.generate` gives for a row; `routes` if they are wanted."""

    key: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routes: npt.NDArray[Any] | None = None


class RolloutEngine(ABC):
    """Generates with its own copy of the weights.

    The order of calls is `wake` (memory for weights), `load`, `generate`, `sleep`; an engine that
    cannot give memory back ignores `wake` and `sleep`. In place of one `generate` there may be any
    number of `start` and `poll`: requests one by one, for samples of several turns. In place of
    `load`, if `pieces` says which boxes of the weights the engine holds, there may be a `writer`
    that takes just those.

    Attributes:
        continuous: Whether requests that start while others are under way run beside them. If not,
            `poll` generates all that wait as one batch, and more of them are worth waiting for.
        routes_dtype: Of the column `routed_experts`; None: samples come without it.
    """

    continuous: ClassVar[bool] = False
    routes_dtype: npt.DTypeLike | None = None

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    @abstractmethod
    def generate(self, batch: Batch, sampling: Sampling, seed: int | Sequence[int]) -> Batch:
        """One response for each row of `prompt_ids`.

        Args:
            seed: Of each row, or of the first one: then the next has the next seed. What a row
                samples depends on its seed alone, not on the rows beside it.

        Returns:
            Columns `response_ids`, `rollout_log_probs` (of the distribution sampled from) and
            `finish_reason` (`stop` or `length`); with `rollout.routing_replay` also
            `routed_experts`, which took each token of prompt and response but the last.
        """

    def start(self, request: Request) -> None:
        """Takes a request; `poll` will give the outcome of each of its samples."""
        for number in range(request.samples):
            key, seed = request.key + number, request.seed + number
            self._waiting.append(request._replace(key=key, seed=seed, samples=1))

    def poll(self) -> list[Finished]:
        """Works for a while on the requests under way, and gives those that it finished."""
        waiting, self._waiting = sorted(self._waiting, key=lambda request: request.key), []
        batches: dict[Sampling, list[Request]] = {}
        for request in waiting:
            batches.setdefault(replace(request.sampling, max_tokens=0), []).append(request)
        return [finished for batch in batches.values() for finished in self._finish(batch)]

    def progress(self) -> dict[int, int]:
        """How many tokens each sample under way has, by key."""
        return {request.key: 0 for request in self._waiting}

    def partial(self) -> dict[int, list[int]]:
        """The tokens so far of samples under way, by key, for those who want to see them as they
        come; none of an engine that cannot say."""
        return {}

    def abort(self, keys: Iterable[int]) -> None:
        """Drops these samples if they are under way: `poll` will not give them."""
        dropped = set(keys)
        self._waiting = [request for request in self._waiting if request.key not in dropped]

    def cancel(self) -> None:
        """Drops all requests under way."""
        self._waiting = []

    def _finish(self, requests: list[Request]) -> Iterator[Finished]:
        """Requests that differ in `max_tokens` only, as one batch: what was sampled beyond a
        request's own limit is cut off, which leaves the distribution of the rest as it was."""
        longest = max(request.sampling.max_tokens for request in requests)
        prompts = [torch.tensor(request.prompt_ids) for request in requests]
        samples = self.generate(
            Batch.from_columns({"prompt_ids": prompts}),
            replace(requests[0].sampling, max_tokens=longest),
            [request.seed for request in requests],
        )
        rows = zip(
            requests,
            samples["response_ids"].rows(),
            samples["rollout_log_probs"].rows(),
            samples["finish_reason"],
            strict=True,
        )
        for request, token_ids, log_probs, finish_reason in rows:
            limit = request.sampling.max_tokens
            yield Finished(
                request.key,
                request.prompt_ids,
                token_ids[:limit].tolist(),
                log_probs[:limit].tolist(),
                "length" if len(token_ids) > limit else finish_reason,
            )

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Takes new weights: every parameter whole, under its checkpoint name."""

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> Pieces | None:
        """Which boxes of the weights this rank's engine holds, and in which of its own tensors.
        It stays the same for the life of the engine, and may be asked while it sleeps.

        Args:
            shapes: Of every parameter, by checkpoint name: those that `load` would be given.

        Returns:
            The pieces of every name; None if the engine takes whole tensors only.
        """
        return None

    def writer(self) -> WeightWriter:
        """Begins to take new weights box by box, as `pieces` said, which was asked before."""
        raise NotImplementedError(f"{type(self).__name__} takes whole tensors only.")

    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Compares all that `pieces` said with the weights that the engine generates with: a check
        after a transfer, as slow as `load`.

        Args:
            weights: As for `load`.

        Returns:
            A sentence for every box that differs in any element, once rounded to the engine's
            precision.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot compare its weights.")

    def wake(self) -> None:  # noqa: B027 (an engine need not do it)
        """Takes back the memory for the weights."""

    def sleep(self) -> None:  # noqa: B027
        """Gives memory of weights and KV cache back, until `wake`."""

    def counts(self) -> dict[str, int]:
        """What the engine counted since it was asked last: `drafted_tokens`, guessed ahead of the
        model, and `accepted_tokens` of these, if it guesses."""
        return {}

    @property
    def awaits_weights(self) -> bool:
        """Whether it was built without weights of its own: they are to come before it generates."""
        return False

    @property
    def keeps_weights(self) -> bool:
        """Whether weights outlive `sleep`; if not, `load` must bring them again, changed or not."""
        return True

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` is to be given the adapters of a model that has any, by peft's names, and
        not its weights with the adapters multiplied in."""
        return False

    def close(self) -> None:  # noqa: B027
        """Ends the engine."""


def row_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """The seed of each row; see `RolloutEngine.generate`."""
    return list(range(seed, seed + rows)) if isinstance(seed, int) else list(seed)


def responses(
    token_ids: list[list[int]],
    log_probs: list[list[float]],
    finish_reasons: list[str],
    routes: list[npt.NDArray[Any]] | None = None,
    routes_dtype: npt.DTypeLike | None = None,
) -> Batch:
    """The batch that `RolloutEngine.generate` returns; with
    `routed_experts` if these have a precision."""
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
    return batch.with_columns({ROUTES: Ragged(torch.from_numpy(values), cu_seqlens)})


def ragged(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Ragged:
    """A token-level column of these rows, typed even where there are none."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(len(row) for row in rows)])
    return Ragged(torch.tensor([x for row in rows for x in row], dtype=dtype), cu_seqlens)

"""RolloutEngine: generates tokens with its own copy of the weights. Token ids in, token ids out.

An engine is a queue of requests (`RequestQueue`); `generate` makes a batch of them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch, RaggedColumn
from hybridrl.batch.begun_responses import UNFINISHED
from hybridrl.batch.kept_sets import KEPT_SETS, KeptSets
from hybridrl.config.schema import LoraAdapterConfig
from hybridrl.rollout.weight_writer import WeightPieces, WeightWriter

Enough = Callable[[int], bool]
"""Told the key of each sample that is complete; returns whether generation may stop."""


class PartialRollout(NamedTuple):
    """When a generation stops before all samples are complete.

    Attributes:
        share: Of the prompts: so many have all their samples.
        steps: Samples that were kept this often are complete, too.
    """

    share: float
    steps: int


@dataclass(frozen=True)
class SamplingSettings:
    """The options by which an engine samples the tokens of a response.

    Attributes:
        max_tokens: Longest response.
        min_tokens: No token that ends a response is chosen before this many.
        temperature: 0 is greedy.
        top_p, top_k, min_p: Nucleus, top-k, and the least probability as a share of the largest;
            1.0, 0 and 0.0 switch them off.
        stop: Texts that end a response; the text itself stays in it.
        stop_token_ids: Tokens that end a response besides the model's own; they stay in it, too.
        series: Names what is drawn, such as an evaluation: its noise then depends on the name, and
            that of what is drawn without one on how often that was.
        partial: Samples may stay unfinished, and rows continue the tokens that they bring; None:
            neither.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = field(default=())
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    series: str | None = None
    min_p: float = 0.0
    partial: PartialRollout | None = None

    def greedy(self) -> SamplingSettings:
        """Return the same limits with the likeliest token at each place."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


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

    def split(self) -> Iterator[Request]:
        """Yield a request for each of its samples."""
        for number in range(self.samples):
            key, seed = self.key + number, self.seed + number
            yield self._replace(key=key, seed=seed, samples=1)


class EngineOutput(NamedTuple):
    """The output for one sample of a request: its tokens, log-probabilities and finish reason.
    `routes` and `kept` sets if they are wanted, and the policy `versions` of the tokens where a
    `SampleStream` gives it."""

    key: int
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routes: npt.NDArray[Any] | None = None
    kept: KeptSets | None = None
    versions: Sequence[int] = ()


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
    def poll(self, enough: Enough | None = None) -> list[EngineOutput]:
        """Work for a while on the requests under way, and return those that it finished.

        Args:
            enough: An engine that generates whole batches stops when it says so, and also returns
                what the other samples have so far, as `UNFINISHED`.
        """

    @abstractmethod
    def abort(self, keys: Iterable[int]) -> None:
        """Drop these samples if they are under way: `poll` will not give them."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop all requests under way."""

    def interrupt(self) -> list[EngineOutput]:
        """Drop all requests under way, each of one sample, and return what they have so far, as
        `UNFINISHED`."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of unfinished samples.")

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


def build_response_batch(
    done: Sequence[EngineOutput],
    routes_dtype: npt.DTypeLike | None = None,
    *,
    keeps_sets: bool = False,
) -> Batch:
    """Return finished samples as rows; see `RolloutEngine.generate` for the columns.

    Args:
        routes_dtype: Of the column `routed_experts`; None: there is none.
        keeps_sets: Whether there is a column `kept_sets`.
    """
    columns: dict[str, Any] = {
        "response_ids": ragged([one.token_ids for one in done], np.int64),
        "rollout_log_probs": ragged([one.log_probs for one in done], np.float32),
        "finish_reason": pa.array([one.finish_reason for one in done], pa.string()),
    }
    if routes_dtype is not None:
        routes = [one.routes for one in done if one.routes is not None]
        columns[ROUTED_EXPERTS] = ragged(routes, routes_dtype)
    if keeps_sets:
        columns[KEPT_SETS] = ragged([(one.kept or KeptSets()).encode() for one in done], np.int32)
    return Batch.from_columns(columns)


def ragged(rows: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> RaggedColumn:
    """Return a column of these rows, each of them flat, typed even where there are none."""
    arrays = [np.asarray(row, dtype).reshape(-1) for row in rows]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(array.size for array in arrays)])
    return RaggedColumn(torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays])), cu_seqlens)


@dataclass(frozen=True)
class EngineSetup:
    """The model that an engine generates with, and where it does so.

    Attributes:
        path: Model folder or hub name.
        tokenizer: Tokenizer folder or hub name.
        dtype: Precision of the weights.
        eos_token_ids: Tokens that end a response.
        device: This rank's device.
        context_length: Longest prompt and response together, in tokens.
        seed: Of the engine; each `generate` brings its own.
        job: Name that no other job on this machine has, for shared memory.
        coming: Shapes of the weights that are brought before the first generation, by checkpoint
            name: the folder's are not read if these fill the model. None: none are brought.
        sleeps: The engine gives its memory to others between generations, with its weights: they
            are brought again. One engine of a process can.
        adapters: It is given adapters of this kind alone, and keeps them beside its weights; None:
            all weights.
        stop_texts: Any request may bring texts that end it, not only `rollout.stop`.
        changes_in_flight: New weights come between two tokens, so that none may be under way then.
    """

    path: str
    tokenizer: str
    dtype: str
    eos_token_ids: Sequence[int]
    device: torch.device
    context_length: int = 0
    seed: int = 0
    job: str = ""
    coming: Mapping[str, tuple[int, ...]] | None = None
    sleeps: bool = False
    adapters: LoraAdapterConfig | None = None
    stop_texts: bool = False
    changes_in_flight: bool = False


class RolloutEngine(RequestQueue):
    """An engine that generates tokens with its own copy of the weights.

    The order of calls is `wake` (memory for weights), `load`, `generate`, `sleep`; an engine that
    cannot give memory back ignores `wake` and `sleep`. In place of one `generate` there may be any
    number of `start` and `poll`: requests one by one, for samples of several turns. In place of
    `load`, if `pieces` says which boxes of the weights the engine holds, there may be a `writer`
    that takes just those.

    Attributes:
        max_sequences: Samples that it runs at a time.
        routes_dtype: Of the column `routed_experts`; None: samples come without it.
        keeps_sets: Whether samples come with the column `kept_sets`.
    """

    max_sequences: int = 256
    routes_dtype: npt.DTypeLike | None = None
    keeps_sets: bool = False

    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        """Generate one response for each row of `prompt_ids`.

        Args:
            seed: Of each row, or of the first one: then the next has the next seed. What a row
                samples depends on its seed alone, not on the rows beside it.

        Returns:
            Columns `response_ids`, `rollout_log_probs` (of the distribution sampled from) and
            `finish_reason` (`stop` or `length`); with `rollout.routing_replay` also
            `routed_experts`, which took each token of prompt and response but the last; where
            tokens are left out of the choice also `kept_sets`.
        """
        for request in requests_of(batch, sampling, row_seeds(seed, len(batch))):
            self.start(request)
        done: dict[int, EngineOutput] = {}
        while len(done) < len(batch):
            done |= {finished.key: finished for finished in self.poll()}
        in_order = [done[row] for row in range(len(batch))]
        return build_response_batch(in_order, self.routes_dtype, keeps_sets=self.keeps_sets)

    @abstractmethod
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take new weights: every parameter whole, under its checkpoint name."""

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightPieces | None:
        """Return which boxes of the weights this rank's engine holds, and in which of its own
        tensors. It stays the same for the life of the engine, and may be asked while it sleeps.

        Args:
            shapes: Of every parameter, by checkpoint name: those that `load` would be given.

        Returns:
            The pieces of every name; None if the engine takes whole tensors only.
        """
        return None

    def writer(self) -> WeightWriter:
        """Begin to take new weights box by box, as `pieces` said, which was asked before."""
        raise NotImplementedError(f"{type(self).__name__} takes whole tensors only.")

    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        """Compare all that `pieces` said with the weights that the engine generates with: a check
        after a transfer, as slow as `load`.

        Args:
            weights: As for `load`.

        Returns:
            A sentence for every box that differs in any element, once rounded to the engine's
            precision.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot compare its weights.")

    def wake(self) -> None:
        """Take back the memory for the weights."""

    def sleep(self) -> None:
        """Give memory of weights and KV cache back, until `wake`."""

    def counts(self) -> dict[str, int]:
        """Return what the engine counted since it was asked last: `drafted_tokens`, guessed ahead
        of the model, and `accepted_tokens` of these, if it guesses; `prompt_tokens` of its requests
        and `cached_tokens` of these, found in its cache, if it keeps prefixes."""
        return {}

    awaits_weights = False
    """True for an engine that was built without weights and needs some before it generates."""
    keeps_weights = True
    """True if the weights survive `sleep`; otherwise they are loaded again, changed or not."""
    takes_adapters = False
    """True if `load_weights` expects adapters under peft's names, not merged weights."""

    def close(self) -> None:
        """End the engine."""


class BatchedEngine(RolloutEngine):
    """An engine that generates whole batches: requests wait until `poll` makes batches of them."""

    continuous = False

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    @abstractmethod
    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch: ...

    def start(self, request: Request) -> None:
        self._waiting.extend(request.split())

    def poll(self, enough: Enough | None = None) -> list[EngineOutput]:
        waiting, self._waiting = sorted(self._waiting, key=lambda request: request.key), []
        batches: dict[SamplingSettings, list[Request]] = {}
        for request in waiting:
            batches.setdefault(replace(request.sampling, max_tokens=0), []).append(request)
        return [finished for batch in batches.values() for finished in self._finish(batch, enough)]

    def interrupt(self) -> list[EngineOutput]:
        waiting, self._waiting = self._waiting, []
        return [EngineOutput(one.key, one.prompt_ids, [], [], UNFINISHED) for one in waiting]

    def progress(self) -> dict[int, int]:
        return {request.key: 0 for request in self._waiting}

    def abort(self, keys: Iterable[int]) -> None:
        dropped = set(keys)
        self._waiting = [request for request in self._waiting if request.key not in dropped]

    def cancel(self) -> None:
        self._waiting = []

    def _finish(
        self, requests: list[Request], enough: Enough | None = None
    ) -> Iterable[EngineOutput]:
        """Generate requests that differ in `max_tokens` only as one batch: what was sampled beyond
        a request's own limit is cut off, which leaves the distribution of the rest as it was."""
        longest = max(request.sampling.max_tokens for request in requests)
        prompts = [torch.tensor(request.prompt_ids) for request in requests]
        samples = self.generate(
            Batch.from_columns({"prompt_ids": prompts}),
            replace(requests[0].sampling, max_tokens=longest),
            [request.seed for request in requests],
        )
        columns = samples["response_ids"].rows(), samples["rollout_log_probs"].rows()
        rows = zip(requests, *columns, samples["finish_reason"], strict=True)
        for request, token_ids, log_probs, finish_reason in rows:
            limit = request.sampling.max_tokens
            yield EngineOutput(
                request.key,
                request.prompt_ids,
                token_ids[:limit].tolist(),
                log_probs[:limit].tolist(),
                "length" if len(token_ids) > limit else finish_reason,
            )

"""RewardPool: scores rows in processes of its own, and outlives whatever happens in them."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, RewardError, UnsupportedMachineError
from hybridrl.processes.pool import ItemResult, ProcessPool, ProcessStartError, WorkItem
from hybridrl.processes.supervised_process import ProcessSpec
from hybridrl.rewards.loading import (
    PickledFunction,
    RewardFunction,
    check_reward_functions,
    make_short_names,
)
from hybridrl.rewards.options import REWARD, FunctionSettings, resolve_options
from hybridrl.rewards.returned_scores import RowScore
from hybridrl.rewards.scoring_round import RewardResult, ScoringRound
from hybridrl.system.content_cache import ContentCache
from hybridrl.system.secret_variables import passing_hint, without_secrets

_IMPORT_S = 120.0
"""For the import of functions beside a job's other work; see `RewardPool.start`."""
_CONCURRENT_ROWS = 64  # of asynchronous functions, in each process
_ERRORS = {kind.__name__: kind for kind in (ConfigError, UnsupportedMachineError)}


class RewardPool:
    """Runs reward functions on rows, in child processes that start with the constructor.

    A row that raises, hangs, returns nonsense or kills its process costs that row (see `on_error`)
    and no other: see `ProcessPool`.

    Args:
        functions: `path/to/file.py:score`, `package.module:score`, a built-in name, or a function
            itself, which is pickled by value, each.
        weights: of the functions in the sum; all 1 if None.
        options: keyword arguments for functions, by their short names (`score` of
            `path/to/file.py:score`).
        processes: number of child processes.
        timeout_s: seconds that one function may take for one row, or for all rows if it is called
            once for all of them.
        on_error: what a failed call does: `fail` raises, `drop` scores the row NaN, `value` takes
            `error_value` for the function's score.
        error_value: see `on_error`.
        watched: number of the last functions, which are only recorded; their weights are 0.
        settings: the names of the settings that the functions come from.
        env: environment variables with secrets that the processes get (see `without_secrets`).
        cache: of the scores of functions with an attribute `cache`; None: every row is scored.

    Attributes:
        columns: of the functions' scores in results.
        remarks: what the functions' modules have to say to the user, by `check_reward`; known
            after `start`.

    Raises:
        ConfigError: if a setting is wrong, or a function's file or name does not exist.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardFunction],
        weights: Sequence[float] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        processes: int = 1,
        timeout_s: float = 30.0,
        on_error: str = "fail",
        error_value: float = 0.0,
        watched: int = 0,
        env: Collection[str] = (),
        settings: FunctionSettings = REWARD,
        cache: ContentCache | None = None,
    ) -> None:
        functions = list(functions)
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        check_reward_functions(functions, self._weights, options, watched, settings)
        self._names = make_short_names(functions)
        kinds = ["reward"] * (len(functions) - watched) + ["check"] * watched
        self.columns = [f"{kind}/{name}" for kind, name in zip(kinds, self._names, strict=True)]
        self._specs = [f if isinstance(f, str) else PickledFunction.of(f) for f in functions]
        self._settings, self._env = settings, env
        self._timeout_s, self._on_error, self._error_value = timeout_s, on_error, error_value
        self.remarks: list[str] = []
        self._asked: set[str] = set()
        self._cache, self._is_cached = cache, False
        self._waiting: dict[int, list[WorkItem]] = {}
        self._lock = threading.Lock()
        given = resolve_options(self._names, options, settings)
        named_by = settings.of_each(len(functions), watched)
        spec = ProcessSpec(
            "reward process",
            [sys.executable, "-m", "hybridrl.rewards.reward_program"],
            (self._specs, sys.path, timeout_s, given, settings, named_by, cache is not None),
            without_secrets(os.environ, env),
        )
        self._pool = ProcessPool(spec, processes, _CONCURRENT_ROWS)
        self._pool.start(processes)

    def asks_for(self, entry: str) -> bool:
        """Return whether a function needs this optional entry of rows (see `list_needed_entries`);
        known after `start`."""
        return entry in self._asked

    def start(self, within_s: float = _IMPORT_S) -> None:
        """Wait until every process has imported the functions and checked that they can work on
        this machine; `score` does this too.

        Args:
            within_s: Seconds that it may take; `timeout_s` if that is longer.

        Raises:
            ConfigError: if a function cannot be loaded, or not in that time.
            RewardError: if its process died.
            UnsupportedMachineError: if it cannot work on this machine.
        """
        with self._lock:
            self._wait_until_ready(within_s, all)

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        progress: Callable[[], None] = lambda: None,
        within_s: float = math.inf,
        groups: Sequence[int] | None = None,
    ) -> RewardResult:
        """Call every function on every row, with the row's entries as keyword arguments.

        Args:
            rows: Hold `prompt`, `response`, `answer` and anything else that pickles.
            progress: Called when rows have been answered, or given up.
            within_s: Seconds that a call may take, if fewer than `timeout_s`.
            groups: The prompt of each row, the rows of one next to each other; None: each row has
                its own.

        Raises:
            RewardError: if a call failed and `on_error` is `fail`, or the pool is closed.
            UnsupportedMachineError: if a function cannot work on this machine, whatever `on_error`
                is.
        """
        with self._lock:
            modes = self._wait_until_ready(_IMPORT_S, any)
            how = (self._on_error, self._error_value, groups)
            work = ScoringRound(rows, self.columns, modes, *how, self._settings.group)
            items = work.items(min(self._timeout_s, within_s))
            try:
                self._pool.submit(self._recall(work, items))
                while not work.is_done:
                    for result in self._poll():
                        self._take(work, result)
                    progress()
            finally:  # after an error, nobody waits for the rows that are still being scored
                self._pool.cancel()
            return work.result(self._weights)

    def close(self) -> None:
        """Kill all processes; a closed pool cannot be used again."""
        self._pool.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_until_ready(self, within_s: float, of: Any) -> list[tuple[bool, str]]:
        """Return of each function whether it is asynchronous, and what it is called for."""
        if self._pool.is_closed:
            raise RewardError("The reward pool is closed; make a new one to score more rows.")
        self._start_s = max(within_s, self._timeout_s)
        try:
            ready = self._pool.wait_until_ready(self._start_s, of=of)
        except ProcessStartError as error:
            raise self._refusal(error) from error
        modes: list[tuple[bool, str]]
        modes, self.remarks, self._asked, self._is_cached = ready
        return modes

    def _recall(self, work: ScoringRound, items: Sequence[WorkItem]) -> Sequence[WorkItem]:
        """Score the calls whose results are cached, and return the others, of equal ones the first:
        the rest wait for its result. A reward process computes the keys, because only they import
        functions."""
        self._waiting = {}
        if self._cache is None or not self._is_cached:
            return items
        payloads = [work.payload(item.key) for item in items]
        self._pool.submit([WorkItem(0, lambda _: payloads, _IMPORT_S, is_blocking=True)])
        (answer,) = self._poll()
        if answer.status == "error":
            raise RewardError(
                "The keys of rows in the cache (cache.use=[verdicts]) could not be computed. "
                f"Correct the attribute `cache` of the reward function.\n{answer.value}"
            )
        if answer.status != "ok":  # the process was lost
            return items
        found, unknown = self._cache.recall(answer.value)
        for place, value in found.items():
            work.score(items[place].key, [RowScore(*row) for row in json.loads(value)])
        for first, *others in unknown:
            self._waiting[items[first].key] = [items[place] for place in others]
        return [items[places[0]] for places in unknown]

    def _poll(self) -> list[ItemResult]:
        try:
            return self._pool.poll(math.inf)
        except ProcessStartError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: ProcessStartError) -> Exception:
        if error.status == "late":
            specs = [s if isinstance(s, str) else s.name for s in self._specs]
            return ConfigError(
                f"`{self._settings.function}` names {', '.join(f'`{spec}`' for spec in specs)}, "
                f"and to import that took longer than {self._start_s:.0f} s, so it was stopped. "
                "Move what waits or is slow out of the import, into the function; or raise "
                f"`{self._settings.group}.timeout_s`."
            )
        if error.status == "ended":
            return RewardError(
                f"A reward process {error} while it imported {', '.join(self._names)}; what it "
                "wrote to the standard error output may say why."
            )
        said = str(error) + passing_hint(str(error), self._settings.group / "env", self._env)
        return _ERRORS.get(error.status, RewardError)(said)

    def _take(self, work: ScoringRound, result: ItemResult) -> None:
        equal = self._waiting.pop(result.key, [])
        if result.status == "ok":
            scores, key = result.value
            work.score(result.key, scores)
            if key is not None and self._cache is not None:
                self._cache.put_many({key: json.dumps(scores).encode()})
                self._cache.hits += len(equal)
                for item in equal:
                    work.score(item.key, scores)
                return
        self._pool.submit(equal)
        if result.status == "ok":
            return
        if result.status == "machine":
            raise UnsupportedMachineError(result.value)
        is_timeout = result.status == "timeout"
        reason = result.value or f"The reward process {result.loss} while it ran this row."
        if is_timeout:
            limit = f"`{self._settings.group}.timeout_s` ({self._timeout_s:g} s)"
            reason = f"It took longer than {limit} and was stopped."
        reason += passing_hint(reason, self._settings.group / "env", self._env)
        work.fail(result.key, reason, is_timeout=is_timeout)

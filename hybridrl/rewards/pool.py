"""RewardPool: scores rows in processes of its own, and outlives whatever happens in them."""

from __future__ import annotations

import logging
import math
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from hybridrl.errors import ConfigError, MachineError, RewardError
from hybridrl.rewards.loading import ByValue, RewardFunction, check_functions, short_names
from hybridrl.rewards.options import REWARD, FunctionSettings, options_of
from hybridrl.rewards.process import ChildProcess
from hybridrl.rewards.scoring_round import RewardResult, Round
from hybridrl.system.secret_variables import passing_hint, without_secrets

__all__ = ["RewardPool", "RewardResult"]

_log = logging.getLogger(__name__)

_IMPORT_S = 120.0
"""For the import of functions beside a job's other work; see `RewardPool.start`."""
_CHUNK_S = 0.01  # a process has about this much work ahead of it, so that it never waits for us
_LARGEST_CHUNK = 64
_CONCURRENT_ROWS = 64  # of asynchronous functions, in each process
_ERRORS = {"ConfigError": ConfigError, "MachineError": MachineError}
_ASYNC_GRACE_S = 0.5  # asynchronous rows time out by themselves; then we look after the process


class RewardPool:
    """Runs reward functions on rows, in child processes that start with the constructor.

    A row that raises, hangs, returns nonsense or kills its process costs that row (see `on_error`)
    and no other: a lost process is replaced and the remaining rows go on. The row of a process that
    was killed from outside is tried again once.

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
        watched: so many of the functions, the last ones, are only looked at; their weights are 0.
        settings: the names of the settings that the functions come from.
        env: environment variables with secrets that the processes get (see `without_secrets`).

    Attributes:
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
        on_error: Literal["fail", "drop", "value"] = "fail",
        error_value: float = 0.0,
        watched: int = 0,
        env: Collection[str] = (),
        settings: FunctionSettings = REWARD,
    ) -> None:
        group = settings.group
        functions = list(functions)
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        self.check(functions, self._weights, options, watched, settings)
        if processes < 1:
            raise ConfigError(f"`{group}.processes` is {processes}, expected 1 or more.")
        if not timeout_s > 0:
            raise ConfigError(f"`{group}.timeout_s` is {timeout_s}, expected more than 0 seconds.")
        if on_error not in ("fail", "drop", "value"):
            raise ConfigError(
                f"`{group}.on_error` is `{on_error}`, expected `fail`, `drop` or `value`."
            )
        self._names = short_names(functions)
        self._watched = watched
        self._timeout_s = self._limit_s = timeout_s
        self._import_s = max(_IMPORT_S, timeout_s)
        self._on_error = on_error
        self._error_value = error_value
        specs = [f if isinstance(f, str) else ByValue.of(f) for f in functions]
        self._settings = settings
        given = options_of(self._names, options, settings)
        named_by = settings.of_each(len(functions), watched)
        self._setup = (specs, sys.path, timeout_s, given, settings, named_by)
        # Of each function, whether it is asynchronous and what it is called for (see `called_for`);
        # known when a process is ready.
        self._modes: list[tuple[bool, str]] = []
        self.remarks: list[str] = []
        self._asked: set[str] = set()
        self._seconds_per_row = math.inf
        self._lock = threading.Lock()
        self._env = env
        self._children = [self._new_child() for _ in range(processes)]
        self._finalizer = weakref.finalize(self, _close_all, self._children, os.getpid())

    check = staticmethod(check_functions)

    def asks_for(self, entry: str) -> bool:
        """Whether a function asks for a further entry of rows (see `signature.asked_of`). Known
        after `start`."""
        return entry in self._asked

    def start(self, within_s: float = _IMPORT_S) -> None:
        """Waits until every process has imported the functions and checked that they can work here.
        `score` does this too.

        Args:
            within_s: Seconds that it may take; `timeout_s` if that is longer.

        Raises:
            ConfigError: if a function cannot be loaded, or not in that time.
            RewardError: if its process died.
            MachineError: if it cannot work on this machine.
        """
        with self._lock:
            self._import_s = max(within_s, self._timeout_s)
            while not all(child.ready for child in self._open_children()):
                self._receive(None)

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        progress: Callable[[], None] = lambda: None,
        within_s: float = math.inf,
        groups: Sequence[int] | None = None,
    ) -> RewardResult:
        """Calls every function on every row, with the row's entries as keyword arguments.

        Args:
            rows: Hold `prompt`, `response`, `answer` and anything else that pickles.
            progress: Called when rows have been answered, or given up.
            within_s: Seconds that a call may take, if fewer than `timeout_s`.
            groups: The prompt of each row, the rows of one next to each other; None: each row has
                its own.

        Raises:
            RewardError: if a call failed and `on_error` is `fail`, or the pool is closed.
            MachineError: if a function cannot work on this machine, whatever `on_error` is.
        """
        with self._lock:
            self._open_children()
            self._limit_s = min(self._timeout_s, within_s)
            self._receive(None, wait=False)  # replaces processes that died since the last round
            while not any(child.ready for child in self._children):
                self._receive(None)
            how = (self._on_error, self._error_value, groups, self._watched)
            work = Round(rows, self._names, self._modes, *how, self._settings.group)
            try:
                while not work.is_done:
                    self._dispatch(work)
                    left = work.unanswered
                    self._receive(work)
                    self._stop_overdue(work)
                    if work.unanswered < left:
                        progress()
            finally:  # after an error, nobody waits for the rows that are still being scored
                for child in [c for c in self._children if c.in_flight]:
                    self._replace(child)
            return work.result(self._weights)

    def close(self) -> None:
        """Kills all processes. A closed pool cannot be used again."""
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.close()

    def _new_child(self) -> ChildProcess:
        return ChildProcess(self._setup, without_secrets(os.environ, self._env))

    def _open_children(self) -> list[ChildProcess]:
        if not self._children:
            raise RewardError("The reward pool is closed; make a new one to score more rows.")
        return self._children

    def _dispatch(self, work: Round) -> None:
        for child in self._children:
            if not child.ready or child.alone:
                continue
            if not child.in_flight:
                child.last_answer = time.monotonic()
                child.is_async = not work.waiting[False]
                if child.is_async and not work.waiting[True] and work.suspects:
                    child.alone = True
                    self._send(child, work, [work.suspects.popleft()])
                    continue
            waiting = work.waiting[child.is_async]
            room = self._room(child)
            fair = math.ceil(len(waiting) / len(self._children))
            tasks = [waiting.popleft() for _ in range(min(room, fair))]
            if tasks:
                self._send(child, work, tasks)

    def _room(self, child: ChildProcess) -> int:
        """How many more tasks the process should have."""
        if child.is_async:
            return _CONCURRENT_ROWS - len(child.in_flight)
        ahead = min(_LARGEST_CHUNK, max(1, int(_CHUNK_S / max(self._seconds_per_row, 1e-9))))
        return ahead - len(child.in_flight) if len(child.in_flight) <= ahead // 2 else 0

    def _send(self, child: ChildProcess, work: Round, tasks: list[int]) -> None:
        child.in_flight |= dict.fromkeys(tasks, time.monotonic())
        child.send(work.message(tasks))

    def _receive(self, work: Round | None, wait: bool = True) -> None:
        """Waits for something to happen to a process, or a deadline, and takes what arrived."""
        poll = select.poll()
        for child in self._children:
            poll.register(child.stdout, select.POLLIN)
            if child.has_outgoing:
                poll.register(child.stdin, select.POLLOUT)
        until = min(map(self._deadline, self._children)) if wait else 0.0
        wait_s = max(0.0, until - time.monotonic())
        events = poll.poll(math.ceil(wait_s * 1000) if wait_s < math.inf else None)
        active = {descriptor for descriptor, _ in events}
        for child in list(self._children):
            if child.stdin in active:
                child.flush()
            if child.stdout in active:
                self._take(child, child.receive(), work)
                if child.closed:
                    self._bury(child, work)
            elif not child.ready and time.monotonic() > self._deadline(child):
                self.close()
                specs = [s if isinstance(s, str) else s.name for s in self._setup[0]]
                raise ConfigError(
                    f"`{self._settings.function}` names "
                    f"{', '.join(f'`{spec}`' for spec in specs)}, and to import that took longer "
                    f"than {self._import_s:.0f} s, so it was stopped. Move what waits or is slow "
                    "out of the import, into the function; or raise "
                    f"`{self._settings.group}.timeout_s`."
                )

    def _take(self, child: ChildProcess, messages: list[Any], work: Round | None) -> None:
        if not child.ready and messages:
            kind, *rest = messages.pop(0)
            if kind == "error":
                self.close()
                said = rest[1] + passing_hint(rest[1], self._settings.group / "env", self._env)
                raise _ERRORS.get(rest[0], RewardError)(said)
            child.ready = True
            self._modes, self.remarks, self._asked = rest
        if not messages or work is None:
            return
        now = time.monotonic()
        if not child.is_async:
            seconds = (now - child.last_answer) / len(messages)
            known = math.isfinite(self._seconds_per_row)
            self._seconds_per_row = (self._seconds_per_row + seconds) / 2 if known else seconds
        child.last_answer = now
        for task, kind, value in messages:
            del child.in_flight[task]
            if kind == "score":
                work.score(task, value)
            elif kind == "machine":
                raise MachineError(value)
            else:
                self._fail(work, task, value)
        child.alone = child.alone and bool(child.in_flight)

    def _fail(self, work: Round, task: int, reason: str | None) -> None:
        """Records a failure; a time-out if there is no reason."""
        limit = (
            f"It took longer than `{self._settings.group}.timeout_s` ({self._timeout_s:g} s) and "
            "was stopped."
        )
        hint = passing_hint(reason or "", self._settings.group / "env", self._env)
        work.fail(task, (reason or limit) + hint, is_timeout=reason is None)

    def _deadline(self, child: ChildProcess) -> float:
        """When the process is overdue, on the monotonic clock."""
        if not child.ready:
            return child.started + self._import_s
        if not child.in_flight:
            return math.inf
        if child.is_async:
            return next(iter(child.in_flight.values())) + self._limit_s + _ASYNC_GRACE_S
        return child.last_answer + self._limit_s

    def _stop_overdue(self, work: Round) -> None:
        now = time.monotonic()
        for child in [c for c in self._children if c.in_flight and self._deadline(c) < now]:
            running = next(iter(child.in_flight))
            child.kill()
            self._take(child, child.receive(), work)
            # It may have finished just before it was killed; then it is not to blame.
            blamed = running in child.in_flight
            self._give_up(child, work, None, blamed)

    def _bury(self, child: ChildProcess, work: Round | None) -> None:
        """Replaces a process that died by itself."""
        child.kill()
        end = child.how_it_ended()
        if not child.ready:
            self.close()
            raise RewardError(
                f"A reward process {end} while it imported {', '.join(self._names)}; what it wrote "
                "to the standard error output may say why."
            )
        if work is None or not child.in_flight:
            _log.warning("An idle reward process %s; it is replaced.", end)
            self._replace(child)
        else:
            self._give_up(child, work, f"The reward process {end} while it ran this row.", True)

    def _give_up(self, child: ChildProcess, work: Round, reason: str | None, blamed: bool) -> None:
        """Replaces a dead process and finds out which of its tasks is to blame."""
        tasks = list(child.in_flight)
        child.in_flight.clear()
        self._replace(child)
        if child.is_async and len(tasks) > 1:
            work.suspects.extend(tasks)
            return
        guilty = tasks[:1] if blamed else []
        if guilty and reason and child.was_killed and work.may_try_again(guilty[0]):
            guilty = []
        work.waiting[child.is_async].extendleft(reversed(tasks[len(guilty) :]))
        for task in guilty:
            self._fail(work, task, reason)

    def _replace(self, child: ChildProcess) -> None:
        child.close()
        self._children[self._children.index(child)] = self._new_child()


def _close_all(children: list[ChildProcess], owner: int) -> None:
    """Closes the processes, unless this is a fork of the process that owns them."""
    if os.getpid() == owner:
        for child in children:
            child.close()
    children.clear()

"""EnvironmentPool: plays episodes in processes of its own, and outlives all that happens there."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.adapter_lookup import find_interpreter, resolve_adapter
from hybridrl.environments.environment_program import LOOPBACK, with_direct_access
from hybridrl.environments.episode_request import EpisodeRequest, EpisodeResult
from hybridrl.errors import ConfigError
from hybridrl.processes.pool import ItemResult, ProcessPool, ProcessStartError, WorkItem
from hybridrl.processes.supervised_process import ProcessSpec
from hybridrl.system.secret_variables import passing_hint, without_secrets

__all__ = ["EnvironmentPool", "EpisodeRequest", "EpisodeResult"]

START_TIMEOUT_S = 120.0
"""For an environment to be loaded."""
_MOST_LOSSES = 3
"""An episode whose process is lost so often is not played again."""
_PROGRAM = Path(__file__).with_name("environment_program.py")
_GIB = 1 << 30


class EnvironmentPool:
    """A pool that plays episodes with the model in child processes, which start with the first
    episode.

    An episode that raises, hangs, floods or kills its process costs that episode and no other: see
    `ProcessPool`. One that is played again has a session of its own (`<session>.again1`), so that
    nothing of the first time is learned from.

    Args:
        config: Its `name` has to be set.
        notify: Called, in a thread of the pool's, when `poll` has something to do.

    Raises:
        ConfigError: if there is no such adapter or interpreter.
    """

    def __init__(
        self, config: EnvironmentConfig, notify: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._python, adapter = find_interpreter(config), resolve_adapter(config)
        is_program = adapter == "command"
        self._hidden = set(config.hidden_columns if is_program else ())
        self._reports = is_program and bool(config.options.get("report"))
        spec = ProcessSpec(
            "environment process",
            [self._python, str(_PROGRAM)],
            {
                "adapter": adapter,
                "name": config.name,
                "options": config.options,
                "search_path": [os.getcwd()],  # noqa: PTH109 - where relative names are looked for
            },
            with_direct_access(without_secrets(os.environ, config.env), *LOOPBACK),
            dumps=lambda message: json.dumps(message, default=_plain).encode(),
            loads=json.loads,
            memory=math.ceil(config.memory_gib * _GIB),
            keeps_output=True,
        )
        self._pool = ProcessPool(spec, config.processes, config.episodes, _MOST_LOSSES)
        self._numbers = itertools.count(1)
        self._plays: dict[int, EpisodeRequest] = {}
        self._notify = notify
        self._news = _News()
        self._polling: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._pool.close)

    def start(self, group: Sequence[EpisodeRequest]) -> None:
        """Queue episodes; never blocks.

        Args:
            group: Samples of one prompt.
        """
        numbered = dict(zip(self._numbers, group, strict=False))
        self._plays |= numbered
        limit_s = self._config.timeout_s
        self._pool.submit(
            WorkItem(number, partial(self._told, play), limit_s)
            for number, play in numbered.items()
        )
        if self._polling is None:
            program = partial(_poll, self._pool, self._news, self._notify)
            self._polling = threading.Thread(target=program, name="environments", daemon=True)
            self._polling.start()

    def poll(self, wait_s: float = 0.0) -> list[EpisodeResult]:
        """Return the episodes that have ended since the last call.

        Args:
            wait_s: Seconds to wait for one, if there is none.

        Raises:
            ConfigError: if the environment cannot be loaded.
        """
        until = time.monotonic() + wait_s
        found: list[EpisodeResult] = []
        while self._plays and not found:
            results = self._results(until)
            ours = [result for result in results if result.key in self._plays]
            found = [self._played(self._plays.pop(result.key), result) for result in ours]
            if time.monotonic() >= until:
                break
        return found

    def cancel(self) -> None:
        self._plays.clear()
        self._pool.cancel()

    def close(self) -> None:
        """End all processes and all that they have started; a closed pool cannot be used again."""
        self._finalizer()

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return at most `count` of the environment's own tasks.

        Raises:
            ConfigError: if it has none, or cannot be loaded.
        """
        self.load()
        self._pool.submit([WorkItem(0, lambda _: {"rows": count}, math.inf)])
        (result,) = self._pool.poll(math.inf)
        if result.loss is not None:
            raise self._refused(
                f"The process {result.loss} when it was asked for its tasks.{result.tail}"
            )
        if result.status != "ok":
            raise self._refused(result.value)
        return list(result.value)

    def load(self) -> None:
        """Start a process if there is none, and wait until it has loaded the environment.

        Raises:
            ConfigError: if it cannot.
        """
        self._pool.start(1)
        try:
            self._pool.wait_until_ready(START_TIMEOUT_S)
        except ProcessStartError as error:
            raise self._not_loaded(error) from error

    def _told(self, play: EpisodeRequest, attempt: int) -> dict[str, Any]:
        """Return the message that gives an episode to a process."""
        session = _session_of(play, attempt)
        episode = {
            "row": {name: value for name, value in play.row.items() if name not in self._hidden},
            "url": play.url.replace(f"/{play.session}/", f"/{session}/"),
            "token": play.token,
            "session": session,
            "greedy": play.greedy,
            "report_token": play.report_token if self._reports else "",
        }
        return {"play": episode}

    def _results(self, until: float) -> list[ItemResult]:
        found = self._news.take(until)
        if isinstance(found, ProcessStartError):
            raise self._not_loaded(found) from found
        if isinstance(found, Exception):
            self.close()
            raise found
        return found

    def _played(self, play: EpisodeRequest, result: ItemResult) -> EpisodeResult:
        if result.status == "ok":
            score = result.value
            reward = math.nan if score["reward"] is None else score["reward"]
            sessions = score["sessions"]
            if sessions is None and result.attempt:
                sessions = {_session_of(play, result.attempt): reward}
            turns, metrics = score["turn_rewards"], score["metrics"]
            return EpisodeResult(play.key, reward, turns, metrics, None, "ok", sessions)
        sessions = {_session_of(play, result.attempt): math.nan} if result.attempt else None
        failure = self._failure(result)
        return EpisodeResult(play.key, math.nan, None, {}, failure, result.status, sessions)

    def _failure(self, result: ItemResult) -> str:
        limit = f"`environment.timeout_s` ({self._config.timeout_s:g} s)"
        if result.loss is None:
            if result.status == "timeout" and result.value is None:
                return f"It took longer than {limit}, and was stopped."
            said = str(result.value)
            return said + passing_hint(said, "environment.env", self._config.env)
        end = {
            "timeout": f"was ended: one step of the episode took longer than {limit}",
            "memory": (
                f"took more than `environment.memory_gib` ({self._config.memory_gib:g} GiB), and "
                "was ended"
            ),
        }.get(result.status, result.loss)
        if not result.is_guilty:
            return f"Its process was lost {result.attempt + 1} times: it {end}."
        return f"The process of the environment {end}.{result.tail}"

    def _not_loaded(self, error: ProcessStartError) -> ConfigError:
        said = str(error)
        if error.status == "ended":
            said = f"The process {error} while it loaded.{error.tail}"
        elif error.status == "late":
            said = (
                f"It took longer than {START_TIMEOUT_S:.0f} s to load, and was stopped.{error.tail}"
            )
        return self._refused(said)

    def _refused(self, said: str) -> ConfigError:
        self.close()
        return ConfigError(
            f"environment.name={self._config.name} cannot be used (environment.python="
            f"{self._python}): {said}{passing_hint(said, 'environment.env', self._config.env)}"
        )


class _News:
    """Results that the polling thread hands to the pool's caller, or why there will be none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: list[ItemResult] = []
        self._error: Exception | None = None

    def put(self, results: list[ItemResult], error: Exception | None = None) -> None:
        with self._changed:
            self._results += results
            self._error = error
            self._changed.notify_all()

    def take(self, until: float) -> list[ItemResult] | Exception:
        with self._changed:
            left = until - time.monotonic()
            self._changed.wait_for(lambda: self._results or self._error, max(0.0, left))
            found, self._results = self._results, []
            return self._error or found


def _poll(pool: ProcessPool, news: _News, notify: Callable[[], None]) -> None:
    """A thread's program, so that processes are looked after whatever the caller's thread does."""
    while not pool.is_closed:
        try:
            results, error = pool.poll(60.0), None
        except Exception as raised:  # of any kind, or who waits for episodes would wait for ever
            results, error = [], raised
        if results or error:
            news.put(results, error)
            notify()
        if error:
            return


def _session_of(play: EpisodeRequest, attempt: int) -> str:
    return f"{play.session}.again{attempt}" if attempt else play.session


def _plain(value: Any) -> Any:
    """Convert a value of a row that JSON cannot encode."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)

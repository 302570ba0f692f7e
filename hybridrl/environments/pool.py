"""EnvironmentPool: plays episodes in processes of its own, and outlives all that happens there."""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.adapter_registry import adapter_of, interpreter
from hybridrl.environments.episode_runner import Play, Played
from hybridrl.environments.process import EnvironmentProcess
from hybridrl.errors import ConfigError
from hybridrl.system.secret_variables import passing_hint, without_secrets

__all__ = ["EnvironmentPool", "Play", "Played"]

_log = logging.getLogger(__name__)

START_S = 120.0
"""For an environment to be loaded."""
_SILENCE_S = 15.0
"""Beyond `timeout_s`: a process that shows no life for so long is stuck."""
_MOST_LOSSES = 3
"""An episode whose process is lost so often is not played again."""
_GIB = 1 << 30


@dataclass
class _Episode:
    play: Play
    losses: int = 0

    def told(self, number: int, hidden: Collection[str], reports: bool) -> dict[str, Any]:
        """As the process is told of it. Played again, it has a session of its own, so that nothing
        of the first time is learned from."""
        play = self.play
        return {
            "number": number,
            "row": {name: value for name, value in play.row.items() if name not in hidden},
            "url": play.url.replace(f"/{play.session}/", f"/{self.session}/"),
            "token": play.token,
            "session": self.session,
            "greedy": play.greedy,
            "report_token": play.report_token if reports else "",
        }

    @property
    def session(self) -> str:
        return f"{self.play.session}.again{self.losses}" if self.losses else self.play.session


class EnvironmentPool:
    """Plays episodes with the model in child processes, which start with the first episode.

    An episode that raises, hangs, floods or kills its process costs that episode and no other. If
    it takes its process along, the others that were played there are played again, in sessions of
    their own (`<session>.again1`); of whom that process did not say who had it, each is then played
    alone, to find out.

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
        self._python = interpreter(config)
        self._setup = {
            "adapter": adapter_of(config),
            "name": config.name,
            "options": config.options,
            "timeout_s": config.timeout_s,
            "search_path": [os.getcwd()],  # noqa: PTH109 - where relative names are looked for
        }
        is_program = self._setup["adapter"] == "command"
        self._hidden = set(config.hidden_columns if is_program else ())
        self._reports = is_program and bool(config.options.get("report"))
        self._news = _News(notify)
        self._numbers = itertools.count(1)
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()
        self._suspects: deque[int] = deque()
        self._done: list[Played] = []
        self._processes: list[EnvironmentProcess] = []
        self._finalizer = weakref.finalize(self, _close_all, self._processes, os.getpid())

    def start(self, group: Sequence[Play]) -> None:
        """Begins episodes, or puts them behind those that are under way. Never waits.

        Args:
            group: Samples of one prompt.
        """
        for play in group:
            number = next(self._numbers)
            self._episodes[number] = _Episode(play)
            self._waiting.append(number)
        self._dispatch()

    def poll(self, wait_s: float = 0.0) -> list[Played]:
        """The episodes that have ended since.

        Args:
            wait_s: Seconds to wait for one, if there is none.

        Raises:
            ConfigError: if the environment cannot be loaded.
        """
        until = time.monotonic() + wait_s
        while True:
            self._receive()
            self._dispatch()
            left = until - time.monotonic()
            if self._done or left <= 0 or not self._episodes:
                found, self._done = self._done, []
                return found
            self._news.wait(min(left, 1.0))  # a second: a stuck process gives no news

    def cancel(self) -> None:
        """Forgets all episodes under way."""
        self._episodes.clear()
        self._waiting.clear()
        self._suspects.clear()
        self._done.clear()
        for process in self._processes:
            if process.in_flight:
                process.in_flight.clear()
                process.is_alone = False
                process.send({"cancel": True})

    def close(self) -> None:
        """Ends all processes, and what they have started. A closed pool cannot be used again."""
        self._finalizer()

    def rows(self, count: int) -> list[dict[str, Any]]:
        """The environment's own tasks, at most so many.

        Raises:
            ConfigError: if it has none, or cannot be loaded.
        """
        process = self.load()
        process.send({"rows": count})
        while True:
            self._news.wait(1.0)
            while not process.messages.empty():
                message = process.messages.get()
                if "rows" in message:
                    return list(message["rows"])
                if "refused" in message:
                    raise self._refused(message["refused"])
            if process.has_ended:
                process.kill()
                raise self._refused(
                    f"The process {process.how_it_ended()} when it was asked for its tasks."
                    f"{process.tail()}"
                )

    def load(self) -> EnvironmentProcess:
        """Starts a process, if there is none, and waits until it has loaded the environment.

        Raises:
            ConfigError: if it cannot.
        """
        if not self._processes:
            self._add_process()
        while not self._processes[0].is_ready:
            self._news.wait(1.0)
            self._receive()
        return self._processes[0]

    def _add_process(self) -> EnvironmentProcess:
        memory = math.ceil(self._config.memory_gib * _GIB)
        environment = without_secrets(os.environ, self._config.env)
        process = EnvironmentProcess(self._python, self._setup, memory, environment, self._news)
        self._processes.append(process)
        return process

    def _dispatch(self) -> None:
        wanted = len(self._waiting) + len(self._suspects)
        while wanted and len(self._processes) < self._config.processes:
            self._add_process()
        for process in sorted(self._processes, key=lambda one: len(one.in_flight)):
            if not process.is_ready or process.is_alone or process.has_ended:
                continue
            if process.is_worn:
                if not process.in_flight:
                    self._replace(process)
                continue
            room = self._config.episodes - len(process.in_flight)
            fair = math.ceil(len(self._waiting) / len(self._processes))
            given = [self._waiting.popleft() for _ in range(min(room, fair, len(self._waiting)))]
            if not given and not process.in_flight and self._suspects:
                process.is_alone = True
                given = [self._suspects.popleft()]
            if given:
                process.in_flight |= dict.fromkeys(given, time.monotonic())
                hidden, reports = self._hidden, self._reports
                told = [self._episodes[number].told(number, hidden, reports) for number in given]
                process.send({"play": told})

    def _receive(self) -> None:
        self._news.clear()
        for process in list(self._processes):
            has_ended = process.has_ended  # before what it said is read
            while not process.messages.empty():
                self._take(process, process.messages.get())
            if process.is_flooded:
                self._bury(process, "output", "wrote more than 16 MiB and was stopped")
            elif has_ended:
                self._bury(process, *self._cause(process))
            elif self._is_stuck(process):
                self._bury(process, "timeout", "showed no life and was stopped")

    def _take(self, process: EnvironmentProcess, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise self._refused(message["refused"])
        process.is_ready = process.is_ready or "ready" in message
        process.is_worn = process.is_worn or "worn" in message
        number = message.get("done")
        if number is None or process.in_flight.pop(number, None) is None:
            return
        process.is_alone = process.is_alone and bool(process.in_flight)
        episode = self._episodes.pop(number)
        reward, kind = message.get("reward"), message["kind"]
        if kind == "error" and process.was_out_of_memory():
            kind = "memory"  # of a program that it had started
        if (failure := message.get("failure")) is not None:
            failure += passing_hint(failure, "environment.env", self._config.env)
        sessions = message.get("sessions")
        if sessions is None and episode.losses:
            sessions = {episode.session: math.nan if reward is None else reward}
        self._done.append(
            Played(
                episode.play.key,
                math.nan if reward is None else reward,
                message.get("turn_rewards"),
                message.get("metrics", {}),
                failure,
                kind,
                sessions,
            )
        )

    def _is_stuck(self, process: EnvironmentProcess) -> bool:
        silent_s = time.monotonic() - process.last_word
        if not process.is_ready:
            if silent_s > START_S:
                raise self._refused(
                    f"It took longer than {START_S:.0f} s to load, and was stopped.{process.tail()}"
                )
            return False
        if not process.in_flight:
            return False
        given = max(process.in_flight.values())
        silent_s = min(silent_s, time.monotonic() - given)
        return silent_s > self._config.timeout_s + _SILENCE_S

    def _cause(self, process: EnvironmentProcess) -> tuple[str, str]:
        """The kind of failure, and the end of a sentence on the process."""
        process.kill()
        limit = f"`environment.memory_gib` ({self._config.memory_gib:g} GiB)"
        if process.ending.get("ending") == "timeout":
            return "timeout", (
                f"was ended: one step of the episode took longer than `environment.timeout_s` "
                f"({self._config.timeout_s:g} s)"
            )
        if process.ending.get("ending") == "memory" or process.was_out_of_memory():
            return "memory", f"took more than {limit}, and was ended"
        return "crash", process.how_it_ended()

    def _bury(self, process: EnvironmentProcess, kind: str, end: str) -> None:
        """Replaces a process, and finds out which of its episodes is to blame."""
        process.kill()
        if not process.is_ready:
            raise self._refused(f"The process {end} while it loaded.{process.tail()}")
        numbers = list(process.in_flight)
        running = process.running()
        self._replace(process)
        if not numbers:
            _log.warning("An idle environment process %s; it is replaced.", end)
            return
        guilty = [running] if running in numbers else numbers if len(numbers) == 1 else []
        others = [number for number in numbers if number not in guilty]
        _log.warning(
            "An environment process %s. %d episodes that it played are played again.",
            end,
            len(others),
        )
        for number in guilty:
            self._fail(number, kind, f"The process of the environment {end}.{process.tail()}")
        for number in others:
            episode = self._episodes[number]
            episode.losses += 1
            if episode.losses == _MOST_LOSSES:
                self._fail(number, kind, f"Its process was lost {_MOST_LOSSES} times: it {end}.")
            elif guilty:
                self._waiting.appendleft(number)
            else:
                self._suspects.append(number)

    def _fail(self, number: int, kind: str, failure: str) -> None:
        key = self._episodes.pop(number).play.key
        self._done.append(Played(key, math.nan, None, {}, failure, kind))

    def _replace(self, process: EnvironmentProcess) -> None:
        process.close()
        self._processes.remove(process)

    def _refused(self, said: str) -> ConfigError:
        self.close()
        return ConfigError(
            f"environment.name={self._config.name} cannot be used (environment.python="
            f"{self._python}): {said}{passing_hint(said, 'environment.env', self._config.env)}"
        )


class _News(queue.SimpleQueue):  # type: ignore[type-arg]
    """Processes that have something to say."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify

    def put(self, process: Any, *_: Any) -> None:
        super().put(process)
        self._notify()

    def wait(self, seconds: float) -> None:
        try:
            self.get(timeout=seconds)
        except queue.Empty:
            return

    def clear(self) -> None:
        while not self.empty():
            self.get()


def _close_all(processes: list[EnvironmentProcess], owner: int) -> None:
    """Ends the processes, unless this is a fork of the process that owns them."""
    if os.getpid() == owner:
        for process in processes:
            process.close()
    processes.clear()

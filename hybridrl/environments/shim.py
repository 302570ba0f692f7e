"""The program of an environment process: `<python> shim.py`, started by the pool.

It needs only Python's standard library, for it runs in the Python of the environment. Messages are
lines of JSON over a socket that is its standard input and output; whatever the environment prints
goes to the standard error output. First comes the setup, answered by `{"ready": true}` or
`{"refused": ...}`. Then come `{"play": [episode, ...]}`, each episode answered by `{"done": number,
...}`; `{"cancel": true}`, which forgets all of them; and `{"rows": count}`, answered by `{"rows":
[...]}`.

All episodes are played in one asyncio loop. An episode that takes too long is cancelled and
answered for; one that blocks the loop for as long ends the process, as does too much memory. Which
episode has the loop stands in a file that the pool reads when the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ADAPTERS = "environment_adapters"
"""The name under which the folder of adapters is a package here."""
MARK = "HYBRIDRL_ENVIRONMENT"
"""A variable that all descendants of a process inherit, so that they can be found and ended."""
NO_PROXY = ("no_proxy", "NO_PROXY")
LOOPBACK = ("127.0.0.1", "localhost")
_TICK_S = 0.25
_HEARTBEAT_TICKS = 20
_LONGEST_TEXT = 8000
_WORN_S = 5.0
"""A cancelled episode that goes on for so long will not stop."""

_episode: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=0)


class MarkedLoop(asyncio.SelectorEventLoop):
    """A loop that notes in shared memory whose episode it runs a step of."""

    def __init__(self, running: memoryview) -> None:
        super().__init__()
        self.running = running
        self.ticks = 0

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        number = _episode.get() if context is None else context.get(_episode, 0)
        if number:
            args, callback = (number, callback, args), self._run_marked
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        number = _episode.get() if context is None else context.get(_episode, 0)
        if number:
            args, callback = (number, callback, args), self._run_marked
        return super().call_at(when, callback, *args, context=context)

    def _run_marked(self, number: int, callback: Any, args: Any) -> None:
        self.running[0] = number
        try:
            callback(*args)
        except Exception:
            self.running[0] = 0
            raise
        self.running[0] = 0  # not after sys.exit() in a task, which ends the process


class Shim:
    """Plays episodes, and tells the pool.

    Args:
        setup: The first message.
        say: Sends a message; never waits.
    """

    def __init__(self, setup: dict[str, Any], loop: MarkedLoop, say: Any) -> None:
        self.setup = setup
        self.loop = loop
        self.say = say
        self.timeout_s = float(setup["timeout_s"])
        self.ages: dict[int, float] = {}  # seconds that each episode had the chance to go on
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.is_busy = threading.Event()
        self._last_tick = 0.0

    async def start(self) -> None:
        """Loads the adapter; its errors are sentences."""
        self.words = importlib.import_module(f"{ADAPTERS}.environment_adapter")
        try:
            package = importlib.import_module(f"{ADAPTERS}.{self.setup['adapter']}")
        except ModuleNotFoundError as error:
            raise self.words.SetupError(
                f"it needs the package `{error.name}`, which is not installed there. Install it, "
                "or set environment.python to the Python of a virtual environment that has it."
            ) from error
        self.adapter = package.Adapter(self.setup["options"], self.setup["name"])
        await self.adapter.start()
        self._last_tick = time.monotonic()
        self.loop.call_later(_TICK_S, self._tick)

    def receive(self, message: dict[str, Any]) -> None:
        """Takes a message from the pool; called in the loop."""
        for told in message.get("play", ()):
            number = told.pop("number")
            os.environ.update(with_direct_access(os.environ, urlsplit(told["url"]).hostname or ""))
            self.ages[number] = 0.0
            context = contextvars.copy_context()
            context.run(_episode.set, number)
            task = context.run(self.loop.create_task, self._play(number, told))
            self.tasks[number] = task
            self.is_busy.set()
        if message.get("cancel"):
            for number in list(self.tasks):
                self._stop(number)
        if "rows" in message:
            keep = self.loop.create_task(self._rows(message["rows"]))
            keep.add_done_callback(lambda _: None)

    async def _play(self, number: int, told: dict[str, Any]) -> None:
        words = self.words
        episode = words.Episode(**told)
        answer: dict[str, Any]
        try:
            score = words.scored(await self.adapter.play(episode))
            answer = {
                "reward": score.reward,
                "turn_rewards": score.turn_rewards,
                "metrics": score.metrics,
                "sessions": score.sessions,
                "kind": "ok",
            }
        except asyncio.CancelledError:
            if number in self.ages:  # nobody here has cancelled it: its own code has
                self._answer(number, {"kind": "error", "failure": _told_of_error()})
            return
        except words.EpisodeError as error:
            answer = {"kind": error.kind, "failure": str(error)}
        except MemoryError:
            answer = {"kind": "memory", "failure": _told_of_error()}
        except BaseException:  # an episode that calls sys.exit() ends itself only
            answer = {"kind": "error", "failure": _told_of_error()}
        finally:
            if episode.is_left_running:
                self.say({"worn": True})
            self.tasks.pop(number, None)
            if not self.tasks:
                self.is_busy.clear()
        self._answer(number, answer)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        if self.ages.pop(number, None) is None:
            return  # it was given up before
        if "failure" in answer:
            answer["failure"] = _shortened(answer["failure"])
        self.say({"done": number, **answer})

    async def _rows(self, count: int) -> None:
        try:
            self.say({"rows": await self.adapter.rows(count)})
        except self.words.SetupError as error:
            self.say({"refused": str(error)})
        except BaseException:
            self.say({"refused": _told_of_error()})

    def _stop(self, number: int) -> None:
        """Cancels an episode that nobody waits for any more."""
        self.ages.pop(number, None)
        task = self.tasks.get(number)
        if task is not None:
            task.cancel()
            self.loop.call_later(_WORN_S, self._look_after, task)

    def _look_after(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            self.say({"worn": True})

    def _tick(self) -> None:
        """Ages the episodes. Time in which another has blocked the loop is not counted."""
        now = time.monotonic()
        passed, self._last_tick = min(now - self._last_tick, 2 * _TICK_S), now
        self.loop.ticks += 1
        for number in self.ages:
            self.ages[number] += passed
        for number in [n for n, age in self.ages.items() if age > self.timeout_s]:
            said = f"It took longer than `environment.timeout_s` ({self.timeout_s:g} s), and was "
            self._answer(number, {"kind": "timeout", "failure": f"{said}stopped."})
            self._stop(number)
        self.loop.call_later(min(_TICK_S, self.timeout_s / 4), self._tick)


def watch(shim: Shim, end: Any) -> None:
    """A thread's program: ends the process when an episode blocks the loop for too long, or when it
    takes too much memory; and shows the pool that it lives."""
    blocked_s, ticks, beats = 0.0, shim.loop.ticks, 0
    limit = shim.setup["memory"]
    while True:
        if not shim.is_busy.wait(30.0):
            blocked_s = 0.0
            continue
        began = time.monotonic()
        time.sleep(_TICK_S)
        beats += 1
        if beats % _HEARTBEAT_TICKS == 0:
            shim.say({"alive": True})
        if shim.loop.ticks == ticks:
            blocked_s += min(time.monotonic() - began, 2 * _TICK_S)
        else:
            blocked_s, ticks = 0.0, shim.loop.ticks
        if blocked_s > shim.timeout_s:
            end({"ending": "timeout"})
        if limit and (taken := _memory_of_tree()) > limit:
            end({"ending": "memory", "bytes": taken})


def with_direct_access(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return environment variables with which HTTP clients ask no proxy for these hosts: what reads
    `http_proxy` looks for exceptions in `no_proxy` or in `NO_PROXY`."""
    known = ",".join(environment.get(name, "") for name in NO_PROXY).split(",")
    names = dict.fromkeys(filter(None, [*map(str.strip, known), *hosts]))
    wanted = "*" if "*" in names else ",".join(names)
    return {**environment, **dict.fromkeys(NO_PROXY, wanted)}


def end_all(mark: str) -> None:
    """Kills every process that has inherited a mark, other than this one, whatever group or session
    it has moved to."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):  # they may start others while they are looked for
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        found = [pid for pid in found if pid != os.getpid() and not _is_zombie(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _memory_of_tree() -> int:
    """Bytes of this process and its descendants that are in memory."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for thread in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return total * mmap.PAGESIZE


def _told_of_error() -> str:
    """The current error with its traceback, from the environment's own code on."""
    kind, error, frames = sys.exc_info()
    here = str(Path(__file__).parent)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(here):
        if frames.tb_next is None:
            break
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames)).strip()


def _shortened(text: str) -> str:
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"


def _take_pipes() -> tuple[Any, int]:
    """Keeps the pipes to the pool for itself: what the environment prints goes to the standard
    error output, and what it reads is empty."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return source, sink


def _load_adapters() -> None:
    """Makes the folder of adapters a package, and nothing else of HybridRL importable by accident:
    its files have names that environments use, too."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]
    package = types.ModuleType(ADAPTERS)
    package.__path__ = [str(here / "adapters")]
    sys.modules[ADAPTERS] = package


def main() -> None:
    """Serves the pool until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's to judge
    mark = os.environ[MARK]
    marker, entrance = int(sys.argv[1]), int(sys.argv[2])
    running = memoryview(mmap.mmap(marker, mmap.PAGESIZE)).cast("q")
    if entrance >= 0:
        os.write(entrance, b"0")
        os.close(entrance)
    source, sink = _take_pipes()
    outgoing: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    setup = json.loads(source.readline() or os._exit(0))
    _load_adapters()
    sys.path += [place for place in setup["search_path"] if place not in sys.path]

    writing = threading.Lock()

    def write(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message, default=str).encode() + b"\n")
        with writing:
            while data:
                data = data[os.write(sink, data) :]

    def send() -> None:  # in a thread, so that the loop never waits for the pool to read
        while True:
            write(outgoing.get())

    def end(message: dict[str, Any] | None = None) -> None:
        end_all(mark)
        if message is not None:
            write(message)
        os._exit(0 if message is None else 1)

    loop = MarkedLoop(running)
    asyncio.set_event_loop(loop)
    shim = Shim(setup, loop, outgoing.put)
    try:
        loop.run_until_complete(shim.start())
    except BaseException as error:
        is_sentence = type(error).__name__ == "SetupError"
        write({"refused": str(error) if is_sentence else _told_of_error()})
        end()
    outgoing.put({"ready": True})

    def read() -> None:
        while line := source.readline():
            loop.call_soon_threadsafe(shim.receive, json.loads(line))
        end()  # the pool is closed, or its process is gone

    for program in (send, read, lambda: watch(shim, end)):
        threading.Thread(target=program, daemon=True).start()
    loop.run_forever()


if __name__ == "__main__":
    main()

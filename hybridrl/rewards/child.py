"""The program of a reward process: `python -m hybridrl.rewards.child`, started by the pool.

It reads messages from its standard input and writes messages to its standard output; see `wire`.
First comes a `Setup`, answered by `("ready", modes, remarks)` or `("error", kind, message)`. Then
come lists of `(task, function, row)`, and each task is answered by `(task, kind, value, extras)`
the moment it is done, so that a task that hangs or kills the process takes no finished one with it.
The kind is `score`, `failure` (the value is then a text), `timeout`, or `machine` (a text, too: why
no row can be scored on this machine).

Synchronous functions run one row after the other, in order; the pool kills the process when a row
takes too long. Asynchronous ones run concurrently, in one event loop for all rows, and time out by
themselves.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridrl.errors import HybridRLError, MachineError, RewardError
from hybridrl.rewards.loading import ByValue, RewardFunction, load_function, short_names
from hybridrl.rewards.options import check_options, parameters_of
from hybridrl.rewards.signature import as_verls, check_signature, is_verls, takes_batch
from hybridrl.rewards.wire import Unpacker, pack

_READ_SIZE = 1 << 16
_PR_SET_PDEATHSIG = 1
_LARGEST = 3.4028234e38
"""Scores become float32, in which anything larger is infinite."""

Outcome = tuple[str, Any, dict[str, float]]  # kind, value, further columns


class Setup(NamedTuple):
    """What a child is told first."""

    functions: list[str | ByValue]
    search_path: list[str]
    timeout_s: float
    options: list[dict[str, Any]]


class Function:
    """A reward function with what is known about calling it."""

    def __init__(self, function: RewardFunction, options: dict[str, Any]) -> None:
        self.call = function
        self._options = options
        target = function.func if isinstance(function, functools.partial) else function
        self.is_async = inspect.iscoroutinefunction(
            target if inspect.isroutine(target) else type(target).__call__
        )
        parameters = parameters_of(function)
        self.takes_batch = takes_batch(parameters)
        self._is_verls = is_verls(parameters)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._accepted = None if takes_all else {p.name for p in parameters}

    def arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        """The entries of the row that the function takes, all of them if it has a `**row`, and its
        options, which win."""
        if self._is_verls:
            row = as_verls(row)
        if self._accepted is not None:
            row = {name: value for name, value in row.items() if name in self._accepted}
        return row | self._options

    def outcome(self, returned: Any, arguments: dict[str, Any]) -> Outcome:
        """What is answered for what the function returned."""
        if not self.takes_batch:
            return _outcome(returned)
        return _outcome_of_batch(returned, len(arguments["completions"]))


def main() -> None:
    """Serves the pool until it closes the pipe."""
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to judge
    _die_with(parent)
    source, sink = _take_pipes()

    def send(message: Any) -> None:
        data = memoryview(pack(message))
        while data:
            data = data[os.write(sink, data) :]

    unpacker = Unpacker()
    inbox: list[Any] = []
    while not inbox:
        inbox += unpacker.feed(_read(source))
    setup = Setup(*inbox.pop(0))
    sys.path += [place for place in setup.search_path if place not in sys.path]
    try:
        functions = _load(setup)
        remarks = _check(setup, functions)
    except HybridRLError as error:
        send(("error", type(error).__name__, str(error)))
        return
    send(("ready", [(f.is_async, f.takes_batch) for f in functions], remarks))
    if any(function.is_async for function in functions):
        import asyncio

        asyncio.run(_serve_concurrently(source, unpacker, functions, setup.timeout_s, send))
    while True:
        for tasks in unpacker.feed(_read(source)):
            for task, function, row in tasks:
                send((task, *_score(functions[function], row)))


def _load(setup: Setup) -> list[Function]:
    functions = []
    names = short_names(setup.functions)
    for spec, name, options in zip(setup.functions, names, setup.options, strict=True):
        function = load_function(spec)
        parameters = parameters_of(function)
        check_options(name, parameters, options)
        check_signature(name, parameters)
        functions.append(Function(function, options))
    return functions


def _check(setup: Setup, functions: list[Function]) -> list[str]:
    """Calls the functions' `check_reward`s, where there are any; gives what they remark.

    Raises:
        HybridRLError: what they raise.
        RewardError: with the traceback of any other error.
    """
    remarks = []
    for function, options in zip(functions, setup.options, strict=True):
        inner = getattr(function.call, "func", function.call)  # of a functools.partial
        module = sys.modules.get(getattr(inner, "__module__", None) or "")
        check = getattr(module, "check_reward", None)
        if check is None:
            continue
        try:
            remark = check(options, setup.timeout_s)
        except HybridRLError:
            raise
        except Exception as error:
            raise RewardError(
                f"`check_reward` of {module and module.__name__} failed:\n{_traceback(error)}"
            ) from error
        if remark is not None:
            remarks.append(str(remark))
    return list(dict.fromkeys(remarks))


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens.

    To the kernel, the parent is the thread that started this process. Should only that thread end,
    the pool finds an idle process dead and replaces it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def _take_pipes() -> tuple[int, int]:
    """Keeps the two pipes to the parent to itself: whatever the user's functions print goes to the
    standard error output, and what they read is empty."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return source, sink


def _read(source: int) -> bytes:
    piece = os.read(source, _READ_SIZE)
    if not piece:  # the parent closed the pool, or is gone
        sys.stdout.flush()
        os._exit(0)
    return piece


def _score(function: Function, row: dict[str, Any]) -> Outcome:
    try:
        return function.outcome(function.call(**function.arguments(row)), row)
    except MachineError as error:
        return "machine", str(error), {}
    except BaseException as error:  # sys.exit() in a reward function ends the row, not the process
        return "failure", _traceback(error), {}


async def _serve_concurrently(
    source: int,
    unpacker: Unpacker,
    functions: list[Function],
    timeout_s: float,
    send: Callable[[Any], None],
) -> None:
    import asyncio

    running = set()

    async def score(task: int, function: Function, row: dict[str, Any]) -> None:
        outcome: Outcome
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = function.outcome(await function.call(**function.arguments(row)), row)
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                outcome = "timeout", None, {}
            elif isinstance(error, MachineError):
                outcome = "machine", str(error), {}
            else:
                outcome = "failure", _traceback(error), {}
        send((task, *outcome))

    def receive() -> None:
        for tasks in unpacker.feed(_read(source)):
            for task, number, row in tasks:
                function = functions[number]
                if function.is_async:
                    job = asyncio.create_task(score(task, function, row))
                    running.add(job)  # the event loop itself holds tasks only weakly
                    job.add_done_callback(running.discard)
                else:
                    send((task, *_score(function, row)))

    loop = asyncio.get_running_loop()
    loop.add_reader(source, receive)
    await loop.create_future()  # forever


def _outcome(returned: Any) -> Outcome:
    """Checks what a reward function returned."""
    entries = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in entries:
        keys = ", ".join(repr(key) for key in entries)
        return _wrong(f"a dictionary without the key 'score'; its keys are: {keys or 'none'}")
    score = _number(entries["score"])
    if score is None:
        what = "a dictionary whose 'score' is " if isinstance(returned, dict) else ""
        hint = ", which is no number"
        if inspect.iscoroutine(returned):
            returned.close()
            hint = "; a function that returns a coroutine must be declared `async def`"
        return _wrong(f"{what}{_shown(entries['score'])}{hint}")
    if not abs(score) <= _LARGEST:
        return _wrong(f"{score}, and a score must be a finite number of 32 bits")
    for key in map(str, entries):
        if not key or key.split("/")[-1] == "std":
            return _wrong(
                f"a dictionary with the key {key!r}, and each number has a metric of its name, "
                "beside which `/std` is its standard deviation: call it otherwise"
            )
    numbers_beside = {str(key): _number(v) for key, v in entries.items() if key != "score"}
    return "score", score, {key: v for key, v in numbers_beside.items() if v is not None}


def _outcome_of_batch(returned: Any, rows: int) -> Outcome:
    """Checks what a function of TRL's shape returned: a number for each row, None for a row that
    is to be dropped. The scores are then a list."""
    if hasattr(returned, "tolist"):  # an array or a tensor
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return _wrong(f"{_shown(returned)}, and one of TRL's shape returns a list of numbers")
    if len(returned) != rows:
        return _wrong(f"{len(returned)} scores for {rows} completions")
    scores = [math.nan if value is None else _number(value) for value in returned]
    for row, (score, value) in enumerate(zip(scores, returned, strict=True)):
        if score is None or (value is not None and not abs(score) <= _LARGEST):
            return _wrong(
                f"{_shown(value)} for completion {row + 1}, expected a finite number of 32 bits"
            )
    return "score", scores, {}


def _wrong(what: str) -> Outcome:
    return "failure", f"The function returned {what}.", {}


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # an array or tensor of one number
    return float(value) if isinstance(value, numbers.Real) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file, which say nothing to the user."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


if __name__ == "__main__":
    main()

"""The program of a reward process: `python -m hybridrl.rewards.child`, started by the pool.

It reads messages from its standard input and writes messages to its standard output; see `wire`.
First comes a `Setup`, answered by `("ready", modes, remarks)` or `("error", kind, message)`. Then
come lists of `(task, function, row)`, and each task is answered by `(task, kind, value)` when it
is done, so that a task that hangs or kills the process takes no finished one with it. The kind is
`score` (the value is then an `Answer` for each row of the task), `failure` (a text), `timeout`, or
`machine` (a text, too: why no row can be scored on this machine).

Synchronous functions run one row after the other, in order; the pool kills the process when a row
takes too long. Asynchronous ones run concurrently, in one event loop for all rows, and time out by
themselves.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridrl.config.setting import Setting
from hybridrl.errors import HybridRLError, MachineError, RewardError
from hybridrl.rewards.loading import ByValue, RewardFunction, load_function, short_names
from hybridrl.rewards.options import FunctionSettings, check_options, parameters_of
from hybridrl.rewards.returned_scores import read_answer, read_answers
from hybridrl.rewards.signature import arguments_of, asked_of, called_for, check_signature
from hybridrl.rewards.wire import Unpacker, pack
from hybridrl.system.redaction import redact, redact_output

_READ_SIZE = 1 << 16
_PR_SET_PDEATHSIG = 1

Outcome = tuple[str, Any]  # kind, value


class Setup(NamedTuple):
    """What a child is told first."""

    functions: list[str | ByValue]
    search_path: list[str]
    timeout_s: float
    options: list[dict[str, Any]]
    settings: FunctionSettings
    named_by: list[Setting]


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
        self.called_for = called_for(parameters)
        self.asks_for = asked_of(parameters)
        self._parameters = parameters

    def arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        """The entries of the row that the function takes, all of them if it has a `**row`, and its
        options, which win."""
        return arguments_of(self._parameters, row) | self._options

    def outcome(self, returned: Any, row: dict[str, Any]) -> Outcome:
        """What is answered for what the function returned."""
        if self.called_for == "row":
            answer = read_answer(returned, row["response"])
            found = answer if isinstance(answer, str) else [answer]
        else:
            found = read_answers(returned, row["responses"])
        if isinstance(found, str):
            return "failure", f"The function returned {found}."
        return "score", found


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
    redact_output()
    sys.path += [place for place in setup.search_path if place not in sys.path]
    try:
        functions = _load(setup)
        remarks = _check(setup, functions)
    except HybridRLError as error:
        send(("error", type(error).__name__, str(error)))
        return
    asked = set().union(*(function.asks_for for function in functions))
    send(("ready", [(f.is_async, f.called_for) for f in functions], remarks, asked))
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
    every = zip(setup.functions, names, setup.options, setup.named_by, strict=True)
    for spec, name, options, setting in every:
        function = load_function(spec, setting)
        parameters = parameters_of(function)
        check_options(name, parameters, options, setup.settings)
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
            names_group = "group" in inspect.signature(check).parameters
            group = (setup.settings.group,) if names_group else ()
            remark = check(options, setup.timeout_s, *group)
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
        return "machine", str(error)
    except BaseException as error:  # sys.exit() in a reward function ends the row, not the process
        return "failure", _traceback(error)


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
                outcome = "timeout", None
            elif isinstance(error, MachineError):
                outcome = "machine", str(error)
            else:
                outcome = "failure", _traceback(error)
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


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file, which say nothing to the user."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return redact("".join(traceback.format_exception(type(error), error, frames)))


if __name__ == "__main__":
    main()

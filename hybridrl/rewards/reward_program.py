"""The program of a reward process: `python -m hybridrl.rewards.reward_program`.

It loads the functions, checks that they can work here, and calls them: plain functions one row
after the other, asynchronous ones concurrently. What an item is answered with is an `RowScore` for
each of its rows, and the key under which these may be cached, or None.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybridrl.config.setting import Setting
from hybridrl.errors import HybridRLError, RewardError, UnsupportedMachineError
from hybridrl.processes import child
from hybridrl.rewards.loading import (
    PickledFunction,
    load_reward_function,
    make_short_names,
)
from hybridrl.rewards.options import FunctionSettings, check_function_options, read_parameters
from hybridrl.rewards.returned_scores import (
    RowScore,
    parse_batch_scores,
    parse_row_score,
)
from hybridrl.rewards.signature import (
    check_call_signature,
    find_call_scope,
    list_needed_entries,
    select_arguments,
)
from hybridrl.rewards.transient_score import TransientScore
from hybridrl.system.content_cache import (
    compute_key,
    hash_installed_code,
    hash_loaded_code,
    hash_plain,
)
from hybridrl.system.redaction import redact, redact_output

_Answer = tuple[list[RowScore], bytes | None]


class RewardSetup(NamedTuple):
    """The first message to a reward process: its functions, the settings they come from, and
    whether there is a cache."""

    functions: list[str | PickledFunction]
    search_path: list[str]
    timeout_s: float
    options: list[dict[str, Any]]
    settings: FunctionSettings
    named_by: list[Setting]
    has_cache: bool


class _UnreadableError(Exception):
    """A function returned what is no score."""


class _Function:
    """A reward function with what is known about calling it."""

    def __init__(self, setup: RewardSetup, number: int) -> None:
        spec, self._options = setup.functions[number], setup.options[number]
        self._spec = spec if isinstance(spec, str) else tuple(spec)
        self.call = function = load_reward_function(spec, setup.named_by[number])
        target = function.func if isinstance(function, functools.partial) else function
        self.is_async = inspect.iscoroutinefunction(
            target if inspect.isroutine(target) else type(target).__call__
        )
        self.cache: bool | Callable[..., Any] = setup.has_cache and getattr(target, "cache", False)
        self.parameters = read_parameters(function)
        self.called_for = find_call_scope(self.parameters)

    def arguments(self, row: dict[str, Any]) -> dict[str, Any]:
        """The entries of the row that the function takes, all of them if it has a `**row`, and its
        options, which win."""
        return select_arguments(self.parameters, row) | self._options

    def hash_reads(self, row: dict[str, Any]) -> bytes | None:
        """Hash all that the function reads, but for its source; None if it is not cached."""
        if not self.cache:
            return None
        arguments = self.arguments(row)
        reads = self.cache(**arguments) if callable(self.cache) else arguments
        return hash_plain("verdicts", self._spec, self._options, reads)

    def answer(self, returned: Any, row: dict[str, Any], reads: bytes | None) -> _Answer:
        if self.called_for == "row":
            answer = parse_row_score(returned, row["response"])
            found = answer if isinstance(answer, str) else [answer]
        else:
            found = parse_batch_scores(returned, row["responses"])
        if isinstance(found, str):
            raise _UnreadableError(f"The function returned {found}.")
        parts = [returned] if self.called_for == "row" else returned
        is_transient = any(isinstance(part, TransientScore) for part in parts)
        # Only now, because the call may have imported more.
        return found, None if is_transient else _compute_key(reads)


def _compute_key(reads: bytes | None) -> bytes | None:
    return None if reads is None else compute_key(reads, hash_loaded_code())


class RewardProgram:
    """See `child.ItemServer`. The payload of an item is the number of a function, and a row; or a
    list of these, whose keys in the cache are wanted."""

    _functions: Sequence[_Function] = ()

    def start(self, given: tuple[Any, ...], server: child.ItemServer) -> tuple[Any, ...]:
        """Loads and checks the functions. Gives of each whether it is asynchronous and what it is
        called for; remarks for the user, by `check_reward`; the further entries of rows that they
        ask for; and whether one is cached."""
        setup = RewardSetup(*given)
        redact_output()
        sys.path += [place for place in setup.search_path if place not in sys.path]
        functions = []
        names = make_short_names(setup.functions)
        for number, (name, options) in enumerate(zip(names, setup.options, strict=True)):
            function = _Function(setup, number)
            check_function_options(name, function.parameters, options, setup.settings)
            check_call_signature(name, function.parameters)
            functions.append(function)
        if setup.has_cache:  # what is replaced from now on is noticed
            hash_installed_code()
            hash_loaded_code()
        remarks = _remarks(setup, functions)
        self._functions = functions
        asked = set[str]().union(
            *(list_needed_entries(function.parameters) for function in functions)
        )
        modes = [(one.is_async, one.called_for) for one in functions]
        return modes, remarks, asked, any(one.cache for one in functions)

    def run_blocking(self, payload: Any) -> _Answer | list[bytes | None]:
        if isinstance(payload, list):
            reads = [self._functions[number].hash_reads(row) for number, row in payload]
            return list(map(_compute_key, reads))
        number, row = payload
        function: _Function = self._functions[number]
        found = function.hash_reads(row)
        return function.answer(function.call(**function.arguments(row)), row, found)

    async def run(self, payload: tuple[int, dict[str, Any]]) -> _Answer:
        number, row = payload
        function = self._functions[number]
        reads = function.hash_reads(row)
        return function.answer(await function.call(**function.arguments(row)), row, reads)

    def explain(self, error: BaseException) -> tuple[str, str]:
        if isinstance(error, HybridRLError) and not self._functions:
            return type(error).__name__, str(error)
        if isinstance(error, UnsupportedMachineError):
            return "machine", str(error)
        if isinstance(error, _UnreadableError):
            return "error", str(error)
        return "error", format_user_traceback(error)


def _remarks(setup: RewardSetup, functions: list[_Function]) -> list[str]:
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
                f"`check_reward` of {module and module.__name__} "
                f"failed:\n{format_user_traceback(error)}"
            ) from error
        if remark is not None:
            remarks.append(str(remark))
    return list(dict.fromkeys(remarks))


def format_user_traceback(error: BaseException) -> str:
    return redact(child.traceback_of(error, (__file__, child.__file__)))


if __name__ == "__main__":
    child.ItemServer(RewardProgram()).serve()

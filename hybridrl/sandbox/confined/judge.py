"""The judge's process: a row's tests run here, whole and as they stand, where the program is not.

The program's names stand for objects of its process. Only data of it counts: an object answers
questions about itself, which is worth as much as data that it could have returned, but it is not
asked whether it equals, holds or exceeds what the test expects.
"""

from __future__ import annotations

import builtins
import importlib
import marshal
import math
import os
import sys

from .linux_kernel import read_message
from .object_exchange import ObjectExchange, ProgramFailedError, encode_message
from .proxies import (
    ARITHMETIC,
    COMPARISONS,
    RemoteClass,
    RemoteData,
    as_constructed,
    as_function,
    handle_of,
    is_same,
)
from .runners import run_tests
from .vacuous import CheckCounter

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, ModuleType
    from typing import Any, NoReturn
else:
    ModuleType = type(sys)

MODULES = ("solution", "program")
"""What tests may import the program as."""
PROGRAM_IS_GONE = 3
"""The exit code of a judge whose program has closed its pipes."""
TESTS = "tests"  # the name of their module: what runs a program as a script does not run here
_ABOUT_OTHERS = {*COMPARISONS, *ARITHMETIC, "contains"}
# Methods of data that change it, or get what is in it, as `[]` does: objects may have their own.
_OF_STORES = {
    *("add", "append", "clear", "copy", "discard", "extend", "get", "insert", "items", "keys"),
    *("pop", "popitem", "remove", "reverse", "setdefault", "sort", "update", "values"),
}
_DATA_METHODS = {n for kind in (str, list, dict, set) for n in dir(kind) if not n.startswith("_")}
_DATA_METHODS -= _OF_STORES


class Judge(ObjectExchange):
    """The end that has the tests.

    Attributes:
        checks: of the test in hand.
    """

    def __init__(self, source: int, sink: int) -> None:
        super().__init__(source, sink)
        self.checks = CheckCounter()
        self._numpy: Any = None

    def ask(self, operation: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        if self.failure:
            raise ProgramFailedError(self.failure)
        if operation in _ABOUT_OTHERS and not self._is_believed(operation, arguments):
            return self._decide(operation, arguments)
        self.checks.has_called |= operation == "call"
        thing, *others = arguments  # the program can change the list, as any that it is passed
        found = super().ask(operation, arguments, options)
        is_method = operation == "getattr" and others[0] in _DATA_METHODS and callable(found)
        if is_method and not isinstance(thing, type) and not self._has_constructed([thing]):
            raise AttributeError(f"`{others[0]}` of an object that the test has not made")
        if operation in ARITHMETIC and self._has_constructed([thing, *others]):
            return as_constructed(found)
        return self.as_got(others[0] if operation == "getattr" else "", found)

    def as_got(self, name: str, found: Any) -> Any:
        """Return an object as the test gets it by a name: a class is one where the name has a
        capital letter; by any other name, or by none, it is called as a function is."""
        handle = handle_of(found) if isinstance(found, type) else None
        if handle and name.lstrip("_")[:1].isupper():
            handle.is_class = True
        elif handle and handle.is_class:
            return as_function(found)
        return found

    def _has_constructed(self, things: list[Any]) -> bool:
        return any(handle and handle.is_constructed for handle in map(handle_of, things))

    def _is_believed(self, operation: str, things: list[Any]) -> bool:
        """Return whether objects of the program are asked about these things: about each other; and
        those that the test has made, whether they hold one of the test's and what they make of it.
        """
        others = [thing for thing in things if not handle_of(thing)]
        if not others or operation in COMPARISONS:
            return not others
        return self._has_constructed(things)

    def _decide(self, operation: str, things: list[Any]) -> Any:
        """Compare an object of the program with something of the test's."""
        mine, other = things
        if type(other).__module__ == TESTS and operation != "contains":
            return NotImplemented  # the test's own class may say
        if operation in ("eq", "ne"):
            content = super().ask("itself", [mine], {}) if handle_of(mine) else None
            is_equal = isinstance(content, RemoteData) and content == other
            return is_equal == (operation == "eq")
        raise TypeError(f"an object of the program and {operation} with something of the test's")

    def perform(self, operation: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Answer the program, to which the test has passed an object. It may be called; only what
        is of a class of the test's is asked for more."""
        thing = arguments[0]
        if id(thing) not in self._numbers:  # a class that both have, such as `type`
            raise AttributeError(f"{operation} of what the test has not passed")
        name = arguments[1] if operation in ("getattr", "setattr", "delattr") else ""
        kind = thing if isinstance(thing, type) and operation == "getattr" else type(thing)
        is_own = kind.__module__ == TESTS and not hasattr(kind, "assertEqual")
        is_asked = operation in ("call", "iter", "next", "len", "bool", "hash", *COMPARISONS)
        if operation == "getattr" and name in ("__name__", "__qualname__"):
            return getattr(thing, name)
        if type(name) is not str or name.startswith("_") or not (is_own or is_asked):
            raise AttributeError(f"{operation} {name}")
        try:
            return super().perform(operation, arguments, options)
        except AssertionError as error:  # a test's own, in a function that it has passed
            self.fail(f"a test's function has failed: {error}")
            raise

    def error_to_raise(self, found: Any) -> BaseException:
        """Return an exception of the program as the test sees it. What a failed assert raises, or
        an exit, is no sign of a right program."""
        if isinstance(found, AssertionError) or not isinstance(found, Exception):
            return self.fail(f"the program has raised {type(found).__name__}")
        return found

    def import_numpy(self) -> Any:
        if self._numpy is None:
            self._numpy = importlib.import_module("numpy")
            self.checks.watch(self._numpy)
        return self._numpy

    def _decode_array(self, *content: Any) -> Any:
        found = super()._decode_array(*content)
        return found if found.size else self.checks.mark_empty(found)


class TestNames(dict[str, "Any"]):
    """The global names of tests: their own, then those of the program.

    A name that Python has, too, is the program's only where a test has no other name of it: a
    program that defines a `sorted` beside its `f` does not sort for the test of `f`.
    """

    def __init__(self, judge: Judge, of_program: set[str]) -> None:
        super().__init__(__name__=TESTS, __builtins__=judge.checks.builtins())
        self._judge, self._of_program = judge, of_program
        self._takes_builtins = False
        self._functions: dict[str, Any] = {}  # and classes: no test sees a program rename them

    def begin(self, used: Iterable[str]) -> None:
        """Prepare for the names in a test."""
        own = self._of_program.intersection(used)
        self._takes_builtins = not any(not hasattr(builtins, name) for name in own)

    def __missing__(self, name: str) -> Any:
        is_builtin = hasattr(builtins, name) or name[:2] == "__"
        if is_builtin and not (self._takes_builtins and name in self._of_program):
            raise KeyError(name)
        return self.of_program(name)

    def of_program(self, name: str) -> Any:
        """Return what the program has under the name now; for a module that it imports, the judge's
        own."""
        if name in self._functions:
            return self._functions[name]
        if name not in self._of_program:
            raise self._judge.fail(f"the program has no `{name}`")
        found, is_module = self._judge.ask("name", [name], {})
        if name == "isclose":
            return math.isclose
        if not is_module:
            found = self._judge.as_got(name, found)
            if type(found).__name__ == "function" or isinstance(found, RemoteClass):
                self._functions[name] = found
            return found
        if found == "numpy":
            return self._judge.import_numpy()
        if found not in sys.stdlib_module_names:
            raise self._judge.fail(f"`{name}` is a module that the test does not import")
        return importlib.import_module(found)

    def public(self) -> list[str]:
        """Return the names that `from program import *` brings."""
        return sorted(name for name in self._of_program if not name.startswith("_"))

    def copy(self) -> TestNames:
        """Return the same names: doctest wants a copy."""
        return self


class ProgramModule(ModuleType):
    """The program as a module that tests import."""

    def __init__(self, name: str, names: TestNames) -> None:
        super().__init__(name)
        self.__all__ = names.public()
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._names.of_program(name)


def judge_tests(source: int, sink: int, given: int) -> NoReturn:
    """Read the tests, run each, and write a line for each that ends: a JSON list of its number,
    whether it passed, its vacuous comparisons and why it failed.

    Args:
        source, sink: descriptors of pipes from and to the program.
        given: the descriptor to read the tests from.
    """
    tests = marshal.loads(read_message(given))
    os.close(given)
    results = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdin, sys.stdout, sys.stderr = (open(0), open(1, "w"), open(2, "w"))  # noqa: SIM115
    judge = Judge(source, sink)
    try:
        of_program = {name for name in judge.receive() if isinstance(name, str)}
    except ProgramFailedError:
        os._exit(PROGRAM_IS_GONE)
    names = TestNames(judge, of_program)
    names.update(__passed__=judge.checks.count, __same__=is_same)
    for name in MODULES:
        sys.modules[name] = ProgramModule(name, names)
    for number, test in enumerate(tests):
        passed, why = _passes(judge, names, *test)
        line = encode_message([number, passed, judge.checks.vacuous, why[:1000]])
        os.write(results, line + b"\n")
    os._exit(PROGRAM_IS_GONE if judge.is_over else 0)


def _passes(
    judge: Judge,
    names: TestNames,
    text: str,
    code: CodeType,
    used: Iterable[str],
    doctests: Iterable[str],
    defined: Iterable[str],
) -> tuple[bool, str]:
    """Run one test; return whether it passed, and why not."""
    checks = judge.checks
    checks.reset()
    if judge.is_over:
        return False, "the program has ended"
    judge.failure = None
    try:
        names.begin(used)
        if "unittest" in text:
            unittest: Any = importlib.import_module("unittest")
            unittest.main = lambda *_, **__: None  # they are run below
        if "numpy" in text:
            checks.watch(judge.import_numpy(), is_for_tests="testing" in text)
        exec(code, names)
        run_tests(doctests, defined, names, checks)
    except BaseException as error:  # a SystemExit too
        return False, f"{type(error).__name__}: {judge.failure or error}"
    if judge.failure or not checks.passed:
        return False, judge.failure or "nothing was checked"
    return True, ""

"""Tests that nobody calls, run as their own libraries run them: classes of unittest, functions and
classes of pytest, doctests."""

from __future__ import annotations

import os
import sys

from .proxies import is_same

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .vacuous import CheckCounter


def run_tests(
    doctests: Iterable[str], defined: Iterable[str], names: Any, checks: CheckCounter
) -> None:
    """Run the tests that a test has defined and not called.

    Raises:
        AssertionError: if one of these fails.
    """
    for text in doctests:
        _run_doctest(text, names, checks)
    found = {name: names[name] for name in defined if name in names}
    cases = {name: kind for name, kind in found.items() if hasattr(kind, "assertEqual")}
    if cases:
        _run_unittest([*cases.values()], checks)
    if any(name.startswith(("test", "Test")) for name in found.keys() - cases.keys()):
        _run_pytest(names, {name: found[name] for name in found if name not in cases}, checks)


def _run_doctest(text: str, names: Any, checks: CheckCounter) -> None:
    import doctest

    parsed = doctest.DocTestParser().get_doctest(text, names, "test", "test.py", 0)
    runner = doctest.DocTestRunner(verbose=False)
    told: list[str] = []
    runner.run(parsed, out=told.append, clear_globs=False)
    if runner.failures:
        raise AssertionError("".join(told))
    for example in parsed.examples:
        if example.want:
            checks.count()


def _run_unittest(cases: list[Any], checks: CheckCounter) -> None:
    import unittest

    loader = unittest.TestLoader()
    case: Any = unittest.TestCase
    case.assertIs = lambda self, *things: self.assertTrue(is_same(*things[:2]))
    result = unittest.TestResult()
    suite = unittest.TestSuite(map(loader.loadTestsFromTestCase, cases))
    suite.run(result)
    if not result.wasSuccessful():
        told = [text for _, text in (*result.failures, *result.errors)]
        raise AssertionError("\n".join(told))
    ran = result.testsRun - len(result.skipped)
    if ran > 0 and not checks.passed and not checks.vacuous:
        checks.count()


def _run_pytest(names: Any, found: dict[str, Any], checks: CheckCounter) -> None:
    """Run plain functions and classes as they are, all else by pytest itself."""
    tests = {name: found[name] for name in found if name.startswith(("test", "Test"))}
    if "pytest" in names or "pytest" in sys.modules or not all(map(_is_plain, tests.values())):
        ran = _run_by_pytest(names)
    else:
        ran = sum(map(_run_plain, tests.values()))
    if ran and not checks.passed and not checks.vacuous:
        checks.count()


def _is_plain(thing: Any) -> bool:
    """Return whether nothing of pytest's is needed to run a test."""
    import inspect

    if not isinstance(thing, type):
        return not inspect.iscoroutinefunction(thing) and not inspect.signature(thing).parameters
    methods = {name: member for name, member in vars(thing).items() if callable(member)}
    return not any(name.startswith(("setup", "teardown")) for name in methods) and all(
        [*inspect.signature(method).parameters] == ["self"]
        for name, method in methods.items()
        if name.startswith("test")
    )


def _run_plain(thing: Any) -> int:
    """Run a function or a class of tests; return the number of tests."""
    if not isinstance(thing, type):
        thing()
        return 1
    names = [name for name in vars(thing) if name.startswith("test")]
    for name in names:
        getattr(thing(), name)()
    return len(names)


def _run_by_pytest(names: Any) -> int:
    """Run tests by pytest; return how many passed. Nothing is read from the folder that the program
    can write in.

    Raises:
        AssertionError: if one did not.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    module = type(sys)("tests")
    vars(module).update((name, thing) for name, thing in names.items() if name[:2] != "__")

    class TestsModule(pytest.Module):
        obj = module

    class Collecting:
        passed = 0

        def pytest_collect_file(self, file_path: Any, parent: Any) -> Any:
            return TestsModule.from_parent(parent, path=file_path)

        def pytest_runtest_logreport(self, report: Any) -> None:
            self.passed += report.when == "call" and report.passed

    # pytest lists the folders above a file, too, up to `--confcutdir`; few of them are readable.
    folder = os.path.dirname(pytest.__file__)  # noqa: PTH120
    anything = os.path.join(folder, "py.typed")  # noqa: PTH118
    options = ["-c", "/dev/null", "--rootdir", "/", "--confcutdir", folder, "--noconftest"]
    options += ["--capture=sys", "--tb=no"]
    disabled = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "doctest")]
    told = Collecting()
    code = pytest.main([*options, *disabled, anything], plugins=[told])
    if code != 0:
        raise AssertionError(f"pytest ended with {code}")
    return told.passed

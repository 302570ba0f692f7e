"""A pytest plugin (`-p golden.sentences`) that writes down which errors the tests make.

Every sentence of a `HybridRLError` is kept as it is made, whether or not it is raised then, by the
first test that made it. Folders of the machine and of tests are replaced by words; errors of
workers are left out, for they carry tracebacks, and so are random tests, whose values change
with every edit of them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

FOLDER = "HYBRIDRL_GOLDEN_SENTENCES"
"""The variable that names the folder for what each worker of pytest writes."""
_PLACES = [
    (re.compile(r"/tmp/pytest-of-[^/\s]+/pytest-\w+(/popen-gw\d+)?(/test_\w+)?"), "<tmp>"),
    (re.compile(r"/tmp/(tmp|campaign-)[\w-]+"), "<tmp>"),
    (re.compile(r"(?<=\(seen from )[^)]+"), "<here>"),
    (re.compile(re.escape(sysconfig.get_paths()["purelib"])), "<packages>"),
    (re.compile(re.escape(sys.prefix)), "<python>"),
    (
        re.compile(r"(?<![\w/])(/[\w.-]+)+(?=/(hybridrl|tests|docs|recipes|examples)\b)"),
        "<project>",
    ),
    (re.compile(re.escape(str(Path.home())) + r"(?=/)"), "<home>"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"(?<=:)\d{4,5}\b(?!,\d)"), "<port>"),
    (re.compile(r"\b(process|pid|line|row|Row) \d+"), r"\1 <number>"),
    (re.compile(r"\d+(\.\d+)?( [KMGT]iB)"), r"<size>\2"),
]
_made: dict[str, str] = {}
_test = [""]


def normalised(sentence: str) -> str:
    """Return it without what differs between two runs of the same test."""
    for place, name in _PLACES:
        sentence = place.sub(name, sentence)
    return sentence


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from hybridrl import errors

    plain = errors.HybridRLError.__init__

    @wraps(plain)
    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        if _test[0] and not isinstance(self, errors.WorkerError):
            is_list = isinstance(self, errors.ConfigError)
            for one in self.problems if is_list else [str(self)]:
                _made.setdefault(normalised(f"{type(self).__name__}: {one}"), _test[0])

    errors.HybridRLError.__init__ = noted  # type: ignore[method-assign]


def pytest_runtest_logstart(nodeid: str) -> None:
    _test[0] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    is_drawn = is_drawn or "fuzz" in item.path.name
    _test[0] = "" if is_drawn else item.nodeid.partition("[")[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _test[0] = ""


def pytest_sessionfinish() -> None:
    if folder := os.environ.get(FOLDER):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        (Path(folder) / f"{worker}.json").write_text(json.dumps(_made))

"""Wrong inputs in number: what becomes of each, in one table.

    python tests/campaigns/campaign.py [settings data models rewards] [--only WORD] [--all]

A module beside this one has `CASES`. Each is tried as a start would be, in this process, up to the
first worker; where it passes and says so, the job runs to its end.
"""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from hybridrl.checks.check_list import Need, check
from hybridrl.errors import HybridRLError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job_inputs import load_job_inputs
from hybridrl.job.preflight import run_preflight
from hybridrl.trainers import load_roles

NAMES = ("settings", "data", "models", "rewards")
WORKS = "works"
RIGHT = ("sentence", "works")
KINDS = (*RIGHT, "other words", "refused", "late", "accepted", "traceback", "hang")
"""A *sentence* is the one expected, before any worker; of *other words* it is not that one; what
should work is *refused*; *late* is a sentence of the job that ran."""


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        name: Short and unique in its module.
        make: Puts what it needs into an empty folder, and gives the overrides.
        expect: `WORKS`, or a pattern that the sentence has.
        runs: Whether a job may run where the checks pass it.
        timeout_s: Longest time for it.
    """

    name: str
    make: Callable[[Path], list[str]]
    expect: str = WORKS
    runs: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: One of `KINDS`.
        words: The sentence, or the end of the traceback.
    """

    case: Case
    kind: str
    words: str = ""

    @property
    def right(self) -> bool:
        """Whether it is as it should be."""
        return self.kind in RIGHT


def outcome(case: Case, folder: Path) -> Outcome:
    """Tries one case in an empty folder."""
    started = False
    try:
        with _limit(case.timeout_s):
            config = load_config(case.make(folder))
            check(config)
            run_preflight(config, Need.FOLDER)
            load_job_inputs(config, load_roles(config), folder, is_whole=True)
            if case.runs:
                started = True
                from hybridrl.main import run

                run(config)
    except HybridRLError as error:
        words = str(error)
        if case.expect == WORKS:
            return Outcome(case, "refused", words)
        fits = re.search(case.expect, words, re.DOTALL) is not None
        return Outcome(case, "late" if started else "sentence" if fits else "other words", words)
    except _TooLongError:
        return Outcome(case, "hang", f"more than {case.timeout_s:g} s")
    except Exception:
        return Outcome(case, "traceback", traceback.format_exc(limit=-3))
    return Outcome(case, "works" if case.expect == WORKS else "accepted")


def outcomes(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Tries all, each in a folder of its own."""
    names = Counter(case.name for case in cases)
    assert max(names.values(), default=1) == 1, f"twice: {names.most_common(1)[0][0]}"
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            yield outcome(case, Path(folder))


class _TooLongError(BaseException):
    """No `Exception`, which what is tried might catch."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def table(found: dict[str, list[Outcome]]) -> Table:
    """How often each kind came, by module."""
    shown = Table("campaign", "cases", *KINDS)
    for name, of_module in found.items():
        counts = Counter(one.kind for one in of_module)
        shown.add_row(name, str(len(of_module)), *(str(counts[kind] or "") for kind in KINDS))
    return shown


def main() -> None:
    """Tries the modules that are named, or all that there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(NAMES))
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--all", action="store_true", help="show the words of every case")
    chosen = parser.parse_args()
    console, found = Console(width=160), {}
    for name in chosen.names or NAMES:
        cases = importlib.import_module(f"campaigns.{name}").CASES
        found[name] = []
        for one in outcomes([case for case in cases if chosen.only in case.name]):
            found[name].append(one)
            if chosen.all or not one.right:
                expected = "" if one.right else f" (expected: {one.case.expect})"
                said = f"{name}: {one.case.name}: {one.kind}{expected}\n    {one.words}"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
    console.print(table(found))
    sys.exit(not all(one.right for of_module in found.values() for one in of_module))


if __name__ == "__main__":
    main()

"""Shows in words how the behaviour of today differs from what `tests/golden` holds: `make golden`.

    python tests/compare_golden.py                      jobs, texts and reports
    python tests/compare_golden.py jobs grpo ppo        some jobs only
    python tests/compare_golden.py sentences            error sentences; runs the unit tests
    python tests/compare_golden.py ... --rewrite        makes that of today what is expected

It ends with exit code 1 if anything differs. Floats of jobs have to be equal to the last bit where
the processor and torch are those of the record, and within a tolerance elsewhere. Sentences are
compared as a set, whichever tests make them, and only what a test of hypothesis does not draw.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

from golden import jobs, sentences, texts

GOLDEN = Path(__file__).parent / "golden"
SENTENCES, MACHINE = GOLDEN / "sentences.txt", GOLDEN / "machine.json"
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""How far floats may be off on another kind of processor, where sums are in another order: three
updates at a learning rate of 0.01 have made 1e-4 of it where AVX2 stood in for AVX-512."""
_SHOWN = 12
_LONGEST = 160


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["jobs", "texts", "reports", "sentences", "kept"]
    parser.add_argument("kind", nargs="?", choices=kinds, help="one of them only")
    parser.add_argument("names", nargs="*", help="some jobs; or tests and options of pytest")
    parser.add_argument("--rewrite", action="store_true", help="expect what there is today")
    chosen, further = parser.parse_known_intermixed_args()
    if chosen.kind == "kept":
        jobs.write_kept_runs(chosen.names)
        return 0
    with TemporaryDirectory() as scratch:
        count = 0
        for line in _differences(chosen, further, Path(scratch)):
            _say(line)
            count += 1
    _say(f"{count} differences." if count else "Nothing differs from tests/golden.")
    return 1 if count and not chosen.rewrite else 0


def _differences(chosen: argparse.Namespace, further: Sequence[str], folder: Path) -> Iterator[str]:
    if chosen.kind == "sentences":
        yield from compare_sentences([*chosen.names, *further], folder, chosen.rewrite)
    if chosen.kind in (None, "texts"):
        yield from compare_texts(folder, chosen.rewrite)
    if chosen.kind in (None, "reports"):
        yield from compare_reports(folder, chosen.rewrite)
    if chosen.kind in (None, "jobs"):
        _say(f"Floats are compared {how_exactly()}.")
        yield from compare_jobs(chosen.names, folder, chosen.rewrite)


def compare_jobs(names: Sequence[str], folder: Path, rewrite: bool = False) -> Iterator[str]:
    """Run jobs, all if none is named, in an empty folder; give their differences in words."""
    (folder := folder / "jobs").mkdir()
    jobs.prepare(folder)
    for name in names or (*jobs.JOBS, *jobs.RESUMED):
        lines = jobs.lines_of_run(jobs.run_job(name, folder))
        yield from compare_lines(GOLDEN / "jobs" / f"{name}.txt", lines, rewrite, is_exact())
    if rewrite:
        MACHINE.write_text(json.dumps(machine(), indent=1) + "\n")


def compare_reports(folder: Path, rewrite: bool = False) -> Iterator[str]:
    """Give the differences of what the pages of kept runs are made of."""
    for name in texts.REPORTS:
        lines = texts.report_lines(name, folder)
        yield from compare_lines(GOLDEN / "reports" / f"{name}.txt", lines, rewrite, is_exact())


def compare_texts(folder: Path, rewrite: bool = False) -> Iterator[str]:
    """Give the differences of helps and printed settings."""
    said = texts.texts(folder)
    files = {file.stem: file for file in sorted((GOLDEN / "texts").glob("*.txt"))}
    for name in sorted(files.keys() | said.keys()):
        file = GOLDEN / "texts" / f"{name}.txt"
        before, now = file.read_text() if name in files else "", said.get(name, "")
        if rewrite:
            _rewrite(file, now)
        pairs = difflib.unified_diff(before.splitlines(), now.splitlines(), n=0, lineterm="")
        yield from (f"{name}: {line}" for line in list(pairs)[2:] if not line.startswith("@@"))


def compare_lines(file: Path, found: dict[str, str], rewrite: bool, exactly: bool) -> Iterator[str]:
    """Give the differences of named JSON values to those of a file."""
    text = file.read_text() if file.exists() else ""
    expected = dict(line.split(": ", 1) for line in text.splitlines())
    found = {name.replace(": ", ":_"): value for name, value in found.items()}
    if rewrite:
        _rewrite(file, "".join(f"{name}: {value}\n" for name, value in found.items()))
    said = []
    for name in dict.fromkeys([*expected, *found]):
        before, now = expected.get(name), found.get(name)
        if before is None:
            said.append(f"{name} is new: {_short(now)}")
        elif now is None:
            said.append(f"{name} is gone; it was {_short(before)}")
        elif before != now and (exactly or not _is_near(json.loads(before), json.loads(now))):
            said.append(f"{name} was {_short(before)}, is {_short(now)}")
    more = [f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
    yield from (f"{file.stem}: {one}" for one in [*said[:_SHOWN], *more])


def compare_sentences(
    arguments: Sequence[str], folder: Path, rewrite: bool = False
) -> Iterator[str]:
    """Run unit tests, all if none is named; give the sentences that vanished or are new."""
    tests = GOLDEN.parent
    program = [sys.executable, "-m", "pytest", "-q", "-p", "golden.sentences"]
    wanted = list(arguments) or [str(tests / "unit"), "-n", "2", "--dist", "worksteal"]
    paths = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        sentences.FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join(reversed(paths)),
    }
    subprocess.run([*program, *wanted], env=environment, check=False)
    made: dict[str, str] = {}
    for file in sorted(folder.glob("*.json")):
        for sentence, test in json.loads(file.read_text()).items():
            made[sentence] = min(test, made.get(sentence, test))
    expected = _read_sentences()
    if rewrite and not arguments:
        _write_sentences(made)
    ran = {test.partition("::")[0].rpartition("/")[2] for test in made.values()}
    for sentence, test in expected.items():
        is_of_these = not arguments or test.partition("::")[0].rpartition("/")[2] in ran
        if sentence not in made and is_of_these:
            yield f"gone, of {test}: {sentence}"
    for sentence, test in made.items():
        if sentence not in expected:
            yield f"new, of {test}: {sentence}"


def machine() -> dict[str, Any]:
    """Return what decides about the last bits of floats: the processor with its vectors and its
    caches, by whose sizes matrix products are cut, and torch."""
    import torch

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", info.partition("\n\n")[0], re.MULTILINE))
    flags = sorted(re.findall(r"\b(?:avx|amx|fma|sse)\w*", found.get("flags", "")))
    kind = [found.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping")]
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return {
        "processor": " ".join([platform.machine(), *kind]),
        "caches": " ".join(path.read_text().strip() for path in caches),
        "vectors": " ".join([torch.backends.cpu.get_cpu_capability(), *flags]),
        "torch": torch.__version__,
    }


def is_exact() -> bool:
    """Whether floats have to be equal to the last bit on this machine."""
    return MACHINE.exists() and json.loads(MACHINE.read_text()) == machine()


def how_exactly() -> str:
    """Say how floats are compared here, and why."""
    if is_exact():
        return "to the last bit: processor and torch are those of the record"
    known = json.loads(MACHINE.read_text()) if MACHINE.exists() else {}
    here = machine()
    others = ", ".join(f"{key} is {here[key]}" for key in here if known.get(key) != here[key])
    return f"within {RELATIVE:g}, for this machine is not that of the record ({others})"


def _is_near(before: Any, now: Any) -> bool:
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_near(before[k], now[k]) for k in now)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_near, before, now))
    if isinstance(before, float) and isinstance(now, float):
        is_same = before == now or (math.isnan(before) and math.isnan(now))
        return is_same or math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(before == now)


def _read_sentences() -> dict[str, str]:
    test, found = "", {}
    for line in SENTENCES.read_text().splitlines() if SENTENCES.exists() else []:
        if line.startswith("  "):
            found[str(json.loads(line))] = test
        else:
            test = line
    return found


def _write_sentences(made: dict[str, str]) -> None:
    of_tests: dict[str, list[str]] = {}
    for sentence, test in made.items():
        of_tests.setdefault(test, []).append(sentence)
    lines: list[str] = []
    for test in sorted(of_tests):
        said = sorted(json.dumps(one, ensure_ascii=False) for one in of_tests[test])
        lines += [test, *(f"  {one}" for one in said)]
    _rewrite(SENTENCES, "".join(f"{line}\n" for line in lines))


def _rewrite(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    if not text:
        file.unlink()


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

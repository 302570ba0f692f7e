"""How many model-written programs a second the sandbox runs, against bare interpreters.

    python benchmarks/sandbox.py

Four threads start trivial programs. The baseline starts `python -I -c` for each with `subprocess`
and confines nothing. The second figure is what one program costs, start to end, with nothing else
running.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from figures import interleave, report

from hybridrl.sandbox.python_runner import find_confinement, run_python

PROGRAM = "print(1 + 1)"
WORKERS, PROGRAMS, ROUNDS = 4, 80, 5


def confined(number: int) -> None:
    outcome = run_python(PROGRAM)
    if outcome.stdout != "2\n":
        raise RuntimeError(f"program {number} ended otherwise: {outcome}")


def bare(number: int) -> None:
    subprocess.run([sys.executable, "-I", "-c", PROGRAM], check=True, capture_output=True)


def per_second(run: Callable[[int], None]) -> float:
    with ThreadPoolExecutor(WORKERS) as pool:
        begin = time.perf_counter()
        list(pool.map(run, range(PROGRAMS)))
        return PROGRAMS / (time.perf_counter() - begin)


def seconds_each(run: Callable[[int], None], programs: int = 20) -> float:
    begin = time.perf_counter()
    for number in range(programs):
        run(number)
    return (time.perf_counter() - begin) / programs


def main() -> None:
    found = find_confinement()  # tries what there is, once
    level = f"{found.namespaces} namespaces, Landlock {found.landlock}"
    ours, baseline = interleave(lambda: per_second(confined), lambda: per_second(bare), ROUNDS)
    name = f"trivial programs a second, {WORKERS} threads ({level})"
    report(name, ours, baseline, ">= 40 programs/s", "programs/s")
    ours, baseline = interleave(lambda: seconds_each(confined), lambda: seconds_each(bare), ROUNDS)
    report("one trivial program, start to end", ours, baseline, "<= 2", "s")


if __name__ == "__main__":
    main()

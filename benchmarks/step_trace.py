"""How many files of the package one training step enters: what a reader of a step has to follow.

    python benchmarks/step_trace.py [settings ...]

By default the third step of the default job, in this process, with the smallest engine.
"""

from __future__ import annotations

import collections
import runpy
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from figures import report

import hybridrl

ROOT = f"{Path(hybridrl.__file__).parent}/"
STEP = 3
SETTINGS = [
    *("executor=inline", "rollout=transformers", "eval.every=0", "warmup.steps=0"),
    f"trainer.steps={STEP + 1}",
]


class StepTrace:
    """Notes the functions of the package that are entered from the begin of a step to the next."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = collections.defaultdict(set)
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        file = code.co_filename.removeprefix(ROOT)
        if file == "run/step_runner.py" and code.co_name == "begin":
            self._is_on = frame.f_locals["number"] == STEP
        if self._is_on:
            self.functions[file].add(code.co_qualname)


def main() -> None:
    trace = StepTrace()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*SETTINGS, f"run.directory={folder}/run", *sys.argv[1:]]
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            runpy.run_module("hybridrl.main", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    rooms = collections.Counter(file.partition("/")[0] for file in trace.functions)
    functions = sum(map(len, trace.functions.values()))
    for file, names in trace.functions.items():
        print(f"{len(names):4d} {file}: {' '.join(sorted(names)[:6])}")
    print(f"{len(trace.functions)} files, {functions} functions, {len(rooms)} rooms: {dict(rooms)}")
    report(
        "step_trace.files",
        len(trace.functions),
        109,
        "<= 0.551",  # 60 files
        "files",
    )


if __name__ == "__main__":
    main()

"""What it costs to record steps, and how much of each device's time their spans explain.

    python benchmarks/timeline.py [--steps 41]

A job of the built-in task, on one device in this process, that records every other step: a step's
time is that from its beginning to the next one's. The default job over two devices and one with a
pool for generation give the coverage: the share of each device's time that its spans cover; and how
much of it is explained, a named phase or a wait for anything but the driver.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from figures import report
from rich.console import Console

from hybridrl.batch.call_record import DRIVER_ROLE
from hybridrl.console.line_console import LineConsole
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.planner.what_if.recorded_graph import OTHER_PHASE
from hybridrl.report.device_spans import IDLE, read_device_spans
from hybridrl.run.loop import RunLoop
from hybridrl.run.step_runner import StepRunner

JOB = ["rollout=transformers", "warmup.steps=5", "eval.every=0", "observe.samples_every=0"]
WARM = 2


class HalfRecorded:
    """Has steps with even numbers not be recorded, and notes when each began."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self._record, self._begin = StepRunner._record, StepRunner.begin
        halves = self

        def begin(steps: StepRunner, number: int):
            halves.begins.append(time.perf_counter())
            return halves._begin(steps, number)

        def record(steps: StepRunner, number: int, *rest) -> None:
            if number % 2:
                halves._record(steps, number, *rest)

        StepRunner.begin, StepRunner._record = begin, record

    def end(self) -> tuple[list[float], list[float]]:
        """Seconds of recorded steps and of the others."""
        StepRunner.begin, StepRunner._record = self._begin, self._record
        took = [b - a for a, b in pairwise(self.begins)]
        return took[WARM::2], took[WARM + 1 :: 2]  # the first is step 1


def run(folder: Path, overrides: list[str]) -> None:
    with (
        Job(load_config([*JOB, f"run.directory={folder}", *overrides]), is_whole=True) as job,
        LineConsole(job.config.trainer.steps, folder.name, Console(stderr=True)) as view,
    ):
        RunLoop(job, view).run()


def coverage(folder: Path) -> tuple[float, float]:
    """The shares of the time that are covered and that are explained, of the worst device."""
    spans = read_device_spans(folder)
    whole = max(span.end for span in spans)
    covered, explained = [], []
    for device in {span.device for span in spans}:
        mine = [span for span in spans if span.device == device]
        said = [span.cause if span.phase == IDLE else span.phase for span in mine]
        named = [
            s for s, what in zip(mine, said, strict=True) if what not in (DRIVER_ROLE, OTHER_PHASE)
        ]
        covered.append(sum(span.seconds for span in mine) / whole)
        explained.append(sum(span.seconds for span in named) / whole)
    return min(covered), min(explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=41)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as root:
        for name, overrides in {
            "one device": ["executor=inline"],
            "two devices": ["num_devices=2"],
            "two pools": ["num_devices=2", "placement=separation"],
        }.items():
            folder = Path(root, name.replace(" ", "-"))
            run(folder, ["trainer.steps=6", *overrides])
            covered, explained = coverage(folder)
            report(f"timeline coverage, {name}", covered, 1.0, ">= 0.97", "share")
            report(f"timeline explained, {name}", explained, 1.0, "", "share")
        halves = HalfRecorded()
        run(Path(root, "halves"), ["executor=inline", f"trainer.steps={steps}"])
    ours, baseline = map(statistics.median, halves.end())
    report("timeline step time", ours, baseline, "<= 1.01", "seconds")


if __name__ == "__main__":
    main()

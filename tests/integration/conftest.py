"""Real Ray, real vLLM, real gloo. Every test leaves no process and nothing in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TINY = ["model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"]
"""A model on which a step takes a tenth of a second."""
SHORT = [*TINY, "warmup.steps=3", "trainer.steps=2", "eval.prompts=16", "data.prompts_per_step=8"]
"""A job of seconds."""
LEARNS = [
    *("reward.function=length", "reward.options.length.limit=4", "reward.options.length.ramp=3"),
    "actor.optimizer.learning_rate=1e-2",
]
"""Short answers are better: learned from nothing in eight steps of a `SHORT` job."""


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of a module: executors join it and leave it running."""
    from hybridrl.ray_backend.executor import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """Ends the test with an error if a process or an entry in shared memory outlives it."""
    shared = "ray" in request.fixturenames
    before = _alive()
    yield
    deadline = time.monotonic() + 15
    while (left := _alive() - before) and time.monotonic() < deadline:
        left = {name for name in left if not (shared and "ray::IDLE" in name)}
        if not left:
            return
        time.sleep(0.2)
    assert not left, f"left behind: {left}"


def _alive() -> set[str]:
    """Children of this process, and what lies in shared memory."""
    names = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            names.add(f"{child.pid} {child.name()}")
    return names | {path.name for path in Path("/dev/shm").iterdir()}


class Command:
    """`python -m hybridrl.main` with overrides, as a user runs it."""

    def __init__(self, folder: Path, *overrides: str, environment: dict[str, str] | None = None):
        self.directory = folder / "run"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hybridrl.main",
                f"run.directory={self.directory}",
                *overrides,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for_step(self, step: int) -> None:
        """Reads the output up to the line of this step."""
        self._wait_for(rf"step +{step}/")

    def _wait_for(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"{pattern!r} never came:\n{''.join(self.lines)}")

    def finish(self, timeout: float = 120) -> int:
        """Reads the rest; gives the exit code."""
        rest, _ = self.process.communicate(timeout=timeout)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def workers(self) -> list[psutil.Process]:
        """The processes of the Ray hosts, the oldest first."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "RayHost" in " ".join(child.cmdline())
        ]
        return sorted(found, key=psutil.Process.create_time)


@pytest.fixture
def command(tmp_path):
    """Starts commands; ends what is left of them."""
    started: list[Command] = []

    def start(*overrides: str, environment: dict[str, str] | None = None) -> Command:
        started.append(Command(tmp_path, *overrides, environment=environment))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()

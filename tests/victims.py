"""A job that is to be killed, as one sees it from outside: its processes, steps, what it leaves.

Every process that belongs to it, started by whomever, has a variable in its environment by which it
is found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

MARK = "HYBRIDRL_VICTIM"
MEASURED = ("time/", "share/", "throughput/", "memory/", "sync/", "checkpoint/")
"""Figures of the machine, which no two runs have in common."""
PATTERNS = {
    "host": "RayHost",
    "relay": "ray::CallRelay",
    "reward": "hybridrl.rewards.reward_program",
    "keeper": "RayMemoryKeeper",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
}
"""What is in the command of each kind of process."""
WITH_RELAY = (
    "import hybridrl.ray_backend.ray_executor as e; e.MAX_DIRECT_HOSTS = 0; "
    "from hybridrl.main import main; main()"
)
STEP = re.compile(r"step +(\d+)/")
_MOST_SECONDS = 240.0


def _hear_signals() -> None:
    """The tests themselves may run under `nohup`, or in the background of a shell."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Victim:
    """`python -m hybridrl.main` with `run.directory=<folder>/run`, started at once.

    Args:
        relay: Calls its hosts through a relay, few as they are.
        under: A command that starts it, such as `nohup`.
        environment: Added to that of the processes.

    Attributes:
        lines: What it printed, with the time of each line; also before it was started again.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        relay: bool = False,
        under: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.run = folder, folder / "run"
        program = ["-c", WITH_RELAY] if relay else ["-m", "hybridrl.main"]
        self._command = [*under, sys.executable, *program, f"run.directory={self.run}", *settings]
        self.mark = f"{os.getpid()}-{folder.name}"
        # SPT_NOENV: Ray's processes change their titles, which may not cost them the mark.
        added = {MARK: self.mark, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        self._environment = {**os.environ, **added, **(environment or {})}
        self.lines: list[tuple[float, str]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """The same command, again."""
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self._environment,
            start_new_session=True,
            preexec_fn=_hear_signals,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic(), line))

    @property
    def output(self) -> str:
        return "".join(line for _, line in self.lines)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def finish(self) -> int:
        """Waits for its end; the exit code."""
        code = self.process.wait(_MOST_SECONDS)
        self._reader.join(10)
        return code

    def rows(self) -> list[dict[str, Any]]:
        """Of `metrics.jsonl`, without what was measured of the machine."""
        file = self.run / "metrics.jsonl"
        found = []
        for line in file.read_text().splitlines() if file.exists() else []:
            with contextlib.suppress(ValueError):  # it is being written
                found.append(json.loads(line))
        return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in found]

    def recoveries(self) -> list[dict[str, Any]]:
        file = self.run / "recoveries.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def model(self) -> dict[str, Any]:
        return load_file(self.run / "model" / "model.safetensors")

    def steps_under_way(self) -> list[int]:
        """Of what is in `checkpoints/` the steps that are not complete."""
        steps = (self.run / "checkpoints").glob("step-*")
        return sorted(int(path.name[5:]) for path in steps if not (path / "complete.json").exists())

    def wait_for_step(self, step: int) -> bool:
        """Waits until this step has figures; False if the job ends first."""
        return self._wait(lambda: any(row["step"] >= step for row in self.rows()))

    def wait_for_line(self, words: str) -> bool:
        """Waits until it has printed what this pattern is; False if the job ends first."""
        return self._wait(lambda: re.search(words, self.output))

    def wait_for_save(self, step: int) -> bool:
        """Waits until this step or a later one is being saved."""

        return self._wait(lambda: max(self.steps_under_way(), default=-1) >= step, pause=0.001)

    def _wait(self, is_there: Any, pause: float = 0.02) -> bool:
        until = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < until and self.runs:
            if is_there():
                return True
            time.sleep(pause)
        return False

    def kill(self, kind: str, number: int = 0) -> bool:
        """Kills the driver, or one process of a kind; whether there was one."""
        if kind == "driver":
            self.process.kill()
            self.finish()
            return True
        found = self.processes(PATTERNS[kind])
        if not found:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            found[number % len(found)].kill()
        return True

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Those of this job that are alive, the oldest first."""
        needle, found = f"{MARK}={self.mark}\0".encode(), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if needle not in environment_of(pid):
                    continue
                process = psutil.Process(pid)
                command = " ".join(process.cmdline())
                if pattern in command and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def seconds_to_next_step(self, killed: float) -> float | None:
        """From that time to the end of the first step after the job went on."""
        went_on = False
        for at, line in self.lines:
            if at > killed and ("Going on after" in line or line.startswith("HybridRL")):
                went_on = True
            if went_on and STEP.match(line):
                return at - killed
        return None

    def left_after(self, seconds: float) -> list[str]:
        """The commands of processes that outlive the job for so long."""
        until = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        return [" ".join(process.cmdline())[:100] for process in left]


def environment_of(pid: int) -> bytes:
    """Return the variables with which a process was started, separated by NUL.

    They appear empty until the kernel has finished starting its program, so this waits for its
    command line, which is written just before them. Kernel threads and zombies have no program.

    Raises:
        OSError: There is no such process, or it belongs to somebody else.
    """
    process, until = Path(f"/proc/{pid}"), time.monotonic() + 10
    while not (command := (process / "cmdline").read_bytes()) and time.monotonic() < until:
        (process / "exe").readlink()
        time.sleep(0.001)
    until = time.monotonic() + 0.2  # a program may well have none
    while not (variables := (process / "environ").read_bytes()) and command:
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return variables


def shared_memory() -> set[str]:
    """What lies in /dev/shm and no process uses."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return names - in_shared_memory_of(psutil.pids()) if names else names


def in_shared_memory_of(processes: Iterable[int]) -> set[str]:
    """What in /dev/shm these have mapped or open."""
    found: set[str] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    found.update(re.findall(r"^/dev/shm/(\S+)", str(file.readlink())))
    return found

"""Real Ray, real vLLM, real gloo. Every test leaves no process and nothing in shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from confined_callers import caller, callers_folder, shared_caller  # noqa: F401 (fixtures)
from victims import in_shared_memory_of

# The longest files, which begin first: no process waits at the end for one that another just began.
LONGEST = ("lost_workers", "main", "resume", "training_state", "products_of_cuts", "algorithms")
LONGEST += ("calls", "episode_ranks", "golden", "data_parallel", "failures", "bad_steps")


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def ray():
    """One Ray for all tests: executors join it and leave it running. Hosts can import the tests."""
    from hybridrl.ray_backend.connection import start_local_cluster
    from hybridrl.ray_backend.ray_import import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        start_local_cluster(12)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def hosts(ray):
    """Host processes for jobs of many tests."""
    from shared_hosts import SharedHosts

    shared = SharedHosts()
    yield shared
    shared.close()


@pytest.fixture
def run(hosts, tmp_path, monkeypatch):
    """Does what `python -m hybridrl.main` does of these settings, on the shared hosts; gives the
    run's folder."""
    from hybridrl import load_config, main

    def finish(*overrides: str) -> Path:
        config = load_config([f"run.directory={tmp_path / 'run'}", *overrides])
        before = signal.getsignal(signal.SIGTERM)
        main.run(config)
        signal.signal(signal.SIGTERM, before)
        return Path(config.run.directory)

    monkeypatch.setattr("hybridrl.job.job.Job", hosts.job)
    return finish


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """Has the command line, in this process and folder, refuse these settings; what it says."""
    from hybridrl import main
    from hybridrl.errors import EXIT_CONFIG_ERROR

    def refuse(*overrides: str) -> str:
        monkeypatch.chdir(tmp_path)
        arguments = ["hybridrl", f"run.directory={tmp_path / 'run'}", *overrides]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main.main()
        assert caught.value.code == EXIT_CONFIG_ERROR
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
        return said

    return refuse


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Ends the test with an error if a process or an entry in shared memory outlives it."""
    before = _alive()
    yield
    deadline = time.monotonic() + 60
    while (left := _alive() - before) and time.monotonic() < deadline:
        left -= _of_others()
        if not left:
            return
        time.sleep(0.2)
    running = [process.cmdline() for process in psutil.process_iter() if str(process.pid) in left]
    assert not left, f"left behind: {left} {running}"


def _alive() -> set[str]:
    """Children of this process, and what lies in shared memory; but for the shared hosts, and for
    the two processes with which Python starts others."""
    names = set()
    pythons = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    shared = sys.modules.get("shared_hosts")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            command = " ".join(child.cmdline())[:200]
            # Ray's own agents and idle workers start when they like, and change their names.
            of_ray = "agent" in command.lower() or "ray::IDLE" in command
            if child.pid not in pythons and not (shared and shared.stays(child)) and not of_ray:
                names.add(str(child.pid))
    return names | {path.name for path in Path("/dev/shm").iterdir()}


def _of_others() -> set[str]:
    """What lies in shared memory and is in use by other programs on this machine."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return in_shared_memory_of(set(psutil.pids()) - ours)


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
        self.wait_for(rf"step +{step}/")

    def wait_for(self, pattern: str) -> None:
        """Reads the output up to a line with this pattern."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"{pattern!r} never came:\n{''.join(self.lines)}")

    def finish(self, timeout: float = 300) -> int:
        """Reads the rest; gives the exit code."""
        rest, _ = self.process.communicate(timeout=timeout)
        self.lines.append(rest)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def workers(self) -> list[psutil.Process]:
        """The processes of the Ray hosts, the oldest first."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "RayHost" in " ".join(child.cmdline()):
                    found.append(child)
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

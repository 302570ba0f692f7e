"""Whether the device that is slow is named, and no other: real jobs of four workers.

    python benchmarks/slow_device.py [--jobs 3]

In each job, after a time in which nobody is slowed down, one worker after another may use half as
much of the processor as its peers have used so far, until it is named or 12 steps have gone. Needs
root, and control groups of version 1.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from figures import report

WORKERS, CLEAN_STEPS, SLOW_STEPS, REST_STEPS = 4, 20, 12, 7
GROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
SETTINGS = [
    *(f"num_devices={WORKERS}", "rollout=transformers", "trainer.steps=100000", "warmup.steps=2"),
    *("eval.prompts=8", "eval.every=0", "observe.show_every=0", "observe.samples_every=0"),
    *("model.tiny={hidden_size: 128, layers: 3, heads: 4}", "data.prompts_per_step=32"),
]


class Run:
    """A job, and what its console has said of slow devices."""

    def __init__(self, folder: Path, address: str) -> None:
        given = [f"run.directory={folder}", f"ray.address={address}", *SETTINGS]
        command = [sys.executable, "-m", "hybridrl.main", *given]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.step, self.slow, self.right, self.wrong = 0, None, 0, 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if found := re.search(r"device (\d+) on .* times as long", line):
                self.right += int(found[1]) == self.slow
                self.wrong += int(found[1]) != self.slow
                print(line.strip(), flush=True)
            elif found := re.match(r"step +(\d+)/", line):
                self.step = int(found[1])

    def go_on(self, steps: int, slow: int | None = None) -> None:
        """Waits for so many steps, or until the slow device has been named."""
        self.slow = slow
        end, right = self.step + steps, self.right
        while self.step < end and self.right == right:
            if not self._reader.is_alive():
                raise SystemExit("The job has ended.")
            time.sleep(0.05)
        self.slow = None

    def workers(self) -> list[psutil.Process]:
        """In the order of their devices: each writes to the log of its rank."""
        found = {}
        for child in psutil.Process().children(recursive=True):
            log = Path(f"/proc/{child.pid}/fd/1")
            rank = re.search(r"logs/\w+-(\d+)\.log$", str(log.readlink()))
            if rank and "RayHost" in " ".join(child.cmdline()):
                found[int(rank[1])] = child
        return [found[rank] for rank in range(WORKERS)]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=3)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or the jobs would need a token
    from hybridrl.ray_backend.connection import start_local_cluster
    from hybridrl.ray_backend.ray_import import ray

    start_local_cluster(WORKERS)  # more slots than there may be cores
    address = ray.get_runtime_context().gcs_address
    wrong, right, rounds, clean = 0, 0, 0, 0
    for _ in range(parser.parse_args().jobs):
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), address)
            try:
                run.go_on(CLEAN_STEPS)
                clean += CLEAN_STEPS
                workers = run.workers()
                for device, worker in enumerate(workers):
                    with limited(worker, used(workers) / 2):
                        run.go_on(SLOW_STEPS, slow=device)
                    run.go_on(REST_STEPS)
                    rounds += 1
                    print(f"# device {device}: {run.right} named so far in this job")
                right, wrong = right + run.right, wrong + run.wrong
            finally:
                run.close()
    print(f"# others named: {wrong}; steps in which none was slow: {clean}")
    report("slow device named", right, rounds, ">= 0.9", "rounds")


def used(workers: list[psutil.Process]) -> float:
    """Cores that one of them uses, on average over some seconds."""
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    begin = time.monotonic()
    time.sleep(5)
    after = [sum(worker.cpu_times()[:2]) for worker in workers]
    return (sum(after) - sum(before)) / (time.monotonic() - begin) / len(workers)


@contextmanager
def limited(worker: psutil.Process, cores: float) -> Iterator[None]:
    """Meanwhile a process gets so many cores' worth of time."""
    group = GROUP / f"hybridrl-slow-{os.getpid()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(max(1000, int(PERIOD_US * cores))))
    before = re.search(r"^\d+:[\w,]*\bcpu\b[\w,]*:(.*)$", _groups(worker), re.MULTILINE)[1]
    (group / "cgroup.procs").write_text(str(worker.pid))
    try:
        yield
    finally:
        (GROUP / before.lstrip("/") / "cgroup.procs").write_text(str(worker.pid))
        group.rmdir()


def _groups(worker: psutil.Process) -> str:
    return Path(f"/proc/{worker.pid}/cgroup").read_text()


if __name__ == "__main__":
    main()

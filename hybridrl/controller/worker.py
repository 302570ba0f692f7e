"""Worker: the base class of the multi-controller programs that a group runs on its devices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from hybridrl.batch.call_record import CallRecord, PhaseSpan, number_of
from hybridrl.layout.rank_mesh import MeshCoordinate
from hybridrl.system.collective_waits import read_wait_seconds
from hybridrl.system.core_pins import PINS

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What sets VmHWM back when written to clear_refs; see man 5 proc."""


class PeakMemory:
    """A measurement of peak memory since it was created.

    Where Linux's high-water mark cannot be set back, the greater of the two ends of the phase.

    Args:
        device_kind: `cpu` or `cuda`.
        resets: Set the mark back, which another thread may be measuring by.
    """

    def __init__(self, device_kind: str, resets: bool = True) -> None:
        self._is_cpu = device_kind == "cpu"
        self._begin = 0
        self._has_mark = False
        if not resets:
            self._has_mark = STATUS.is_file()
        elif self._is_cpu:
            self._has_mark = _set_mark_back()
            self._begin = 0 if self._has_mark else psutil.Process().memory_info().rss
        else:
            torch.accelerator.reset_peak_memory_stats()

    def bytes(self) -> int:
        """Return the peak so far, in bytes."""
        if not self._is_cpu:
            return int(torch.accelerator.max_memory_allocated())
        if self._has_mark:
            return _mark()
        return max(self._begin, int(psutil.Process().memory_info().rss))


def _set_mark_back() -> bool:
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:  # another system, or a container that forbids it
        return False
    return STATUS.is_file()


def _mark() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the ranks of a group meet to build process groups.

    `listener` is the bound socket on rank 0, which serves, and None on the others.
    """

    address: str
    port: int
    listener: socket | None = None


@dataclass(frozen=True)
class WorkerContext:
    """The role, rank and location of a worker.

    Attributes:
        role: Name of the group, for example `actor`.
        rank: This worker's number in its group of `world_size`.
        host: This host process's number in the job of `hosts`.
        local_rank: This host's number among those of its node.
        device_kind: `cpu` or `cuda`.
        run_directory: Folder of the run; None when the run keeps no files.
        rendezvous: Where the ranks meet; None in the `inline` executor, which has one only.
    """

    role: str
    rank: int
    world_size: int
    host: int = 0
    hosts: int = 1
    local_rank: int = 0
    device_kind: str = "cpu"
    run_directory: Path | None = None
    rendezvous: Rendezvous | None = None


class Worker:
    """One rank of a group. `@transfer` marks the methods that the driver may call.

    Attributes:
        record: What this rank does in the current call.
        rows: Numbers of the rows that the current call was given, in the driver's table; None if it
            was given none.
        table_rows: The number of all rows of that table.
        is_beside: Whether its calls run on the host's second thread; see `runs_beside`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.rows: npt.NDArray[np.int64] | None = None
        self.table_rows = 0
        self.is_beside = False
        self.record = CallRecord(context.role, context.rank, "__init__")

    def coordinates(self) -> Mapping[str, MeshCoordinate]:
        """Return where this rank stands on the axes of its meshes; the driver asks once."""
        return {"dp": MeshCoordinate(self.context.rank, self.context.world_size)}

    @property
    def attention_length(self) -> float:
        """The length of a row, in tokens, whose attention takes as long as all else; rows are dealt
        to ranks by it (see `compute_row_costs`). Infinite: work is linear in tokens."""
        return math.inf

    @property
    def shares_prompts(self) -> bool:
        """Return whether the samples of a prompt are computed together, with their prompt once."""
        return False

    def enter(self) -> None:
        """Make this role's state current where it is global to the process. Called before each
        call."""

    def leave(self) -> None:
        """Finish a call. Called after each call, and after the worker is built."""

    @classmethod
    def runs_beside(cls, keywords: Mapping[str, Any]) -> bool:
        """Return whether workers built with these keywords need neither a device nor process
        groups. Their calls then run on a second thread of the host, beside those of other roles."""
        return False

    @property
    def takes_memory(self) -> bool:
        """True if the worker's calls use device memory, so that other roles must offload first."""
        return False

    def make_room(self) -> None:
        """Release device memory. Called before another role of this device uses it."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the current call, and record its peak memory."""
        memory = PeakMemory(self.context.device_kind, resets=not self.is_beside)
        begin, start, waited = time.perf_counter(), time.time(), read_wait_seconds()
        before, self.record.phase = self.record.phase, name
        try:
            with nullcontext() if self.is_beside else PINS.phase(name, self.record.loads):
                yield
        finally:
            self.record.phase = before
            seconds = time.perf_counter() - begin
            self.record.phases[name] += seconds
            self.record.add_span(
                PhaseSpan(name, start, start + seconds, read_wait_seconds() - waited)
            )
            self.record.peaks[name] = max(self.record.peaks.get(name, 0), memory.bytes())

    def progress(self) -> None:
        """Report that a part of the current call is done, so that its deadline counts from here.
        For calls of many parts that each have a time limit of their own. Safe from any thread."""
        self.record.progress = time.monotonic()

    def report(self, **metrics: float) -> None:
        """Add metrics to the current call. Values of a name add up; of names that end in `_max` the
        largest counts. See `CallRecord.metrics`."""
        found = self.record.metrics
        for name, value in metrics.items():
            before = found.get(name)
            # What is no number is told of by the driver.
            if before is not None and None not in (number_of(before), number_of(value)):
                value = max(before, value) if name.endswith("_max") else before + value
            found[name] = value

    def close(self) -> None:
        """Release processes and files. Called once, when the job ends without an error."""

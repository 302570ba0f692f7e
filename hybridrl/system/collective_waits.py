"""Waiting for other ranks: the seconds spent, and the operation and process group that a thread
waits in.

Every wait of Python code for torch.distributed ends in `Work.wait`, those of FSDP and of vLLM too,
so that is where time is taken, and in `count_wait`, around what waits for a store. Which
operations have begun, torch itself records (its flight recorder) and counts; nobody reads that
until something hangs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C
from torch.distributed import distributed_c10d

_GPU_BACKEND = "nccl"
"""The back end whose operations are queued on a GPU, so that nobody waits for them in Python."""
_POINT_TO_POINT_NAMES = {12: "a message to another rank", 13: "a message from another rank"}
"""By torch's number of an operation; they are of two ranks only, and not recorded."""

_seconds = threading.local()
_waiting: dict[int, tuple[Any, float]] = {}
"""By thread: what it waits for, and since when."""


@dataclass(frozen=True)
class CollectiveWait:
    """The collective or message that a thread waits for.

    Attributes:
        operation: Its name.
        seconds: For how long.
        group: Name of the process group, which is the same on all its ranks; empty: not known, as
            of messages.
        number: Of the operation, among those of the group.
        ranks: Of the group, in the world that it was made in.
    """

    operation: str
    seconds: float
    group: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()


def start_timing_waits() -> None:
    """Start timing all waits of torch.distributed in this process. A second call does nothing."""
    work: Any = distributed_c10d.Work
    if not hasattr(work.wait, "untimed"):
        work.wait = _timed(work.wait)


def _timed(untimed: Any) -> Any:
    def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
        thread = threading.get_ident()
        _waiting[thread] = work, time.perf_counter()
        try:
            with count_wait():
                return untimed(work, *arguments, **keywords)
        finally:
            _waiting.pop(thread, None)

    wait.untimed = untimed  # type: ignore[attr-defined]
    return wait


@contextmanager
def count_wait() -> Iterator[None]:
    """Count the time of the block as waiting for other ranks."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        _seconds.total = read_wait_seconds() + time.perf_counter() - begin


def read_wait_seconds() -> float:
    """Return the seconds that this thread has waited for other ranks so far. Waits for GPU
    operations are not included, since the thread only queues them; see `count_gpu_operations`."""
    return getattr(_seconds, "total", 0.0)


def count_gpu_operations() -> int:
    """Return the number of collectives that this process has queued on its GPU so far."""
    worlds = list(distributed_c10d._world.pg_map.items())
    on_gpu: list[Any] = [group for group, (backend, _) in worlds if _GPU_BACKEND in backend]
    return sum(
        group._get_backend(torch.device("cuda"))._get_sequence_number_for_group()
        for group in on_gpu
    )


def count_started_operations() -> dict[str, int]:
    """Return the number of operations that this process has started in each process group, named
    `gloo:<name>` or `nccl:<name>`. Safe from any thread."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    backends = [
        (group.group_name, group._get_backend(device))
        for group in groups
        for device in group._device_types
    ]
    return {
        f"{backend.name()}:{name}": backend._get_sequence_number_for_group()
        for name, backend in backends
    }


def find_current_wait(thread: int | None) -> CollectiveWait | None:
    """Return the wait that a thread is in; None if it is in none. Safe from any thread."""
    if (found := _waiting.get(thread or 0)) is None:
        return None
    work, begin = found
    seconds = time.perf_counter() - begin
    if message := _POINT_TO_POINT_NAMES.get(work._get_op_type()):
        return CollectiveWait(message, seconds)
    # Torch has a second recorder for NCCL.
    dump = getattr(_C._distributed_c10d, "_dump_fr_trace_json", None)
    trace = {} if dump is None else json.loads(dump(includeCollectives=True, onlyActive=False))
    if not (recorded := trace.get("entries")):
        return CollectiveWait("an operation of all", seconds)
    # Who waits for an earlier one, because several are under way, waits in the same place.
    newest = max(recorded, key=lambda entry: int(entry["time_created_ns"]))
    name, group = newest["profiling_name"], newest["process_group"][0]
    backend, _, operation = name.partition(":")
    number = newest["collective_seq_id"]
    return CollectiveWait(operation, seconds, f"{backend}:{group}", number, _ranks_of(group))


def _ranks_of(name: str) -> tuple[int, ...]:
    for group, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        if group is not None and group.group_name == name:
            return tuple(sorted(ranks))
    return ()

"""Check of cores, memory, shared memory and file limits of this machine or container."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator

import psutil

from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok, report_problem
from hybridrl.errors import ConfigError
from hybridrl.system import shared_memory
from hybridrl.system.container_limits import read_container_memory, read_core_quota
from hybridrl.system.formatting import format_bytes
from hybridrl.system.open_files import MIN_OPEN_FILES, check_open_files

_MIN_MEMORY_BYTES, _LOW_MEMORY_BYTES = 2 * 2**30, 6 * 2**30
"""Bytes: with less the default job was not seen to run, or gets slow."""
_MIN_SHARED_MEMORY_BYTES, _LOW_SHARED_MEMORY_BYTES = 32 * 2**20, 2 * 2**30
"""Bytes of /dev/shm: engines need some, and Ray's object store takes what there is."""
_LOW_OPEN_FILES = 4096
"""Ray opens files for each worker: a job of many devices needs more than the least."""
_SHARED_MEMORY_ADVICE = (
    "In Docker: --shm-size=8g; in Kubernetes: an emptyDir with medium: Memory; else, as root: "
    "mount -o remount,size=8g /dev/shm."
)


def check() -> Iterator[DoctorFinding]:
    """Yield findings on cores, memory, shared memory and open files."""
    yield check_cores()
    yield check_memory()
    yield from check_shared_memory()
    yield check_file_limit()


def check_cores() -> DoctorFinding:
    """Compare `OMP_NUM_THREADS` with the usable cores and the CPU quota."""
    usable = len(os.sched_getaffinity(0))
    quota = read_core_quota()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    what = f"{usable} usable" + (f", of which a quota leaves {quota:g}" if quota else "")
    most = min(usable, quota or usable)
    if asked.isdecimal() and int(asked) > max(1, most):
        return report_note(
            "cores",
            f"{what}; OMP_NUM_THREADS={asked} is more, which makes small operations many times "
            "slower",
            "unset OMP_NUM_THREADS: each worker takes its share.",
        )
    if quota and quota < usable:
        return report_note(
            "cores",
            what,
            f"export OMP_NUM_THREADS={max(1, int(quota))}, so that threads do not wait for each "
            "other.",
        )
    if (load := os.getloadavg()[0]) > most and not asked:
        return report_note(
            "cores",
            f"{what}; other work keeps {load:.1f} busy",
            "export OMP_NUM_THREADS=1 if it stays so: threads that wait for each other make small "
            "steps many times slower.",
        )
    return report_ok("cores", what)


def check_memory() -> DoctorFinding:
    """Check the free memory of the machine, or of the container if it has less."""
    seen = psutil.virtual_memory()
    total, free = seen.total, seen.available
    if container := read_container_memory():
        total = min(total, container.limit)
        free = min(free, max(0, container.limit - container.used))
    what = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free < _MIN_MEMORY_BYTES:
        return report_problem("memory", what, "End other programs, or give the container more.")
    if free < _LOW_MEMORY_BYTES:
        return report_note("memory", what, "`hybridrl plan` says what a job takes.")
    return report_ok("memory", what)


def check_shared_memory() -> Iterator[DoctorFinding]:
    """Yield findings on free shared memory, and on segments left by dead jobs."""
    folder = shared_memory.SHARED_MEMORY_FOLDER
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield report_problem(
            str(folder), f"cannot be looked at: {error.strerror}", _SHARED_MEMORY_ADVICE
        )
        return
    what = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if not os.access(folder, os.W_OK):
        yield report_problem(
            str(folder), f"{what}, and this user may not write there", _SHARED_MEMORY_ADVICE
        )
    elif usage.free < _MIN_SHARED_MEMORY_BYTES:
        yield report_problem(
            str(folder), f"{what}: engines and Ray cannot start", _SHARED_MEMORY_ADVICE
        )
    elif usage.free < _LOW_SHARED_MEMORY_BYTES:
        yield report_note(
            str(folder), f"{what}: Ray keeps batches on the disk instead", _SHARED_MEMORY_ADVICE
        )
    else:
        yield report_ok(str(folder), what)
    if left := shared_memory.list_stale_segments():
        yield report_note(
            str(folder),
            f"{format_bytes(sum(left.values()))} left by dead jobs: {', '.join(sorted(left))}",
            "The next job here removes it.",
        )


def check_file_limit() -> DoctorFinding:
    """Check the limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{limit if limit >= 0 else 'any number'} for a process (ulimit -n)"
    try:
        check_open_files()
    except ConfigError:
        cure = "ulimit -n 4096, before the job."
        return report_problem("open files", f"{what}; a job needs {MIN_OPEN_FILES} or more", cure)
    if 0 <= limit < _LOW_OPEN_FILES:
        return report_note("open files", what, "ulimit -n 65536, before a job on many devices.")
    return report_ok("open files", what)

"""Check of cores, memory, shared memory and file limits of this machine or container."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from hybridrl.checks.machine.device_checks import LEAST_OPEN_FILES, check_open_files
from hybridrl.doctor.finding import Finding, note, ok, problem
from hybridrl.errors import ConfigError
from hybridrl.system import shared_memory
from hybridrl.system.cpu_cores import core_quota
from hybridrl.system.formatting import readable_bytes

CGROUP = Path("/sys/fs/cgroup")
LEAST_MEMORY, LITTLE_MEMORY = 2 * 2**30, 6 * 2**30
"""Bytes: with less the default job was not seen to run, or gets slow."""
LEAST_SHARED, LITTLE_SHARED = 32 * 2**20, 2 * 2**30
"""Bytes of /dev/shm: engines need some, and Ray's object store takes what there is."""
FEW_FILES = 4096
"""Ray opens files for each worker: a job of many devices needs more than the least."""
SHARED_CURE = (
    "In Docker: --shm-size=8g; in Kubernetes: an emptyDir with medium: Memory; else, as root: "
    "mount -o remount,size=8g /dev/shm."
)


def check() -> Iterator[Finding]:
    """Yield findings on cores, memory, shared memory and open files."""
    yield cores()
    yield memory()
    yield from shared()
    yield open_files()


def cores() -> Finding:
    """Compare `OMP_NUM_THREADS` with the usable cores and the CPU quota."""
    usable = len(os.sched_getaffinity(0))
    quota = core_quota()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    what = f"{usable} usable" + (f", of which a quota leaves {quota:g}" if quota else "")
    most = min(usable, quota or usable)
    if asked.isdecimal() and int(asked) > max(1, most):
        return note(
            "cores",
            f"{what}; OMP_NUM_THREADS={asked} is more, which makes small operations many times "
            "slower",
            "unset OMP_NUM_THREADS: each worker takes its share.",
        )
    if quota and quota < usable:
        return note(
            "cores",
            what,
            f"export OMP_NUM_THREADS={max(1, int(quota))}, so that threads do not wait for each "
            "other.",
        )
    if (load := os.getloadavg()[0]) > most and not asked:
        return note(
            "cores",
            f"{what}; other work keeps {load:.1f} busy",
            "export OMP_NUM_THREADS=1 if it stays so: threads that wait for each other make small "
            "steps many times slower.",
        )
    return ok("cores", what)


def memory() -> Finding:
    """Check the free memory of the machine, or of the container if it has less."""
    seen = psutil.virtual_memory()
    total, free = seen.total, seen.available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError):  # no limit, or it cannot be seen
        pass
    what = f"{readable_bytes(free)} of {readable_bytes(total)} free"
    if free < LEAST_MEMORY:
        return problem("memory", what, "End other programs, or give the container more.")
    if free < LITTLE_MEMORY:
        return note("memory", what, "`hybridrl plan` says what a job takes.")
    return ok("memory", what)


def shared() -> Iterator[Finding]:
    """Yield findings on free shared memory, and on segments left by dead jobs."""
    folder = shared_memory.FOLDER
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield problem(str(folder), f"cannot be looked at: {error.strerror}", SHARED_CURE)
        return
    what = f"{readable_bytes(usage.free)} of {readable_bytes(usage.total)} free"
    if not os.access(folder, os.W_OK):
        yield problem(str(folder), f"{what}, and this user may not write there", SHARED_CURE)
    elif usage.free < LEAST_SHARED:
        yield problem(str(folder), f"{what}: engines and Ray cannot start", SHARED_CURE)
    elif usage.free < LITTLE_SHARED:
        yield note(str(folder), f"{what}: Ray keeps batches on the disk instead", SHARED_CURE)
    else:
        yield ok(str(folder), what)
    if left := shared_memory.leftovers():
        yield note(
            str(folder),
            f"{readable_bytes(sum(left.values()))} left by dead jobs: {', '.join(sorted(left))}",
            "The next job here removes it.",
        )


def open_files() -> Finding:
    """Check the limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"{limit if limit >= 0 else 'any number'} for a process (ulimit -n)"
    try:
        check_open_files()
    except ConfigError:
        cure = "ulimit -n 4096, before the job."
        return problem("open files", f"{what}; a job needs {LEAST_OPEN_FILES} or more", cure)
    if 0 <= limit < FEW_FILES:
        return note("open files", what, "ulimit -n 65536, before a job on many devices.")
    return ok("open files", what)

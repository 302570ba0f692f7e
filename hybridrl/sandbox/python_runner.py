"""A sandbox for Python programs that a model wrote.

`run_python` runs a program in a process of its own that can neither harm the machine nor read what
is on it, and that leaves nothing behind. docs/sandbox.md says what is promised, and what is not, at
each level of confinement. It needs Linux 5.13 or newer on x86-64 or
aarch64, with seccomp, and either namespaces (as root, or as a user who may make user namespaces)
or Landlock; without them it refuses to run anything. What is there is found out once per process,
by trying, and logged; see `find_confinement`.

In every case the program

* has no capabilities, no environment, no descriptors but its standard input and outputs, and can
  make only the system calls that a computing Python program needs. It can start threads, but no
  process and no other program; it cannot make sockets (but pairs of connected ones), send signals
  to others, trace, mount, or use keys, BPF, io_uring or shared memory. Changing permissions and
  times of files seems to succeed and does nothing;
* reads the interpreter's libraries and installed packages, and no other file. It writes only in
  its scratch folder, its working directory, which is removed at its end;
* keeps to `SandboxLimits`. At its end, at a limit, and when the calling process dies, it is killed.

With namespaces, nothing else exists for it: no /proc, no users, no network device, no other
process. Its scratch folder is memory and has a size limit.

Without namespaces, Landlock and seccomp do the confining. The program then can learn whether a
file exists, its size and times; its scratch folder is on the disk under `tempfile.gettempdir()`,
limited by `file_mib` for each file but not in their number; for an ordinary user, whose processes
the kernel counts together, it usually cannot start threads. A supervisor killed by SIGKILL leaves
that folder behind.

Not covered: holes in the kernel itself; what a program can tell from the time that things take;
use of the processor's caches and of memory bandwidth; the kernel's release, the size of memory, the
number of processors and the time since the machine started, which system calls tell. The packages
beside the interpreter are readable, so they must hold no secrets. Memory is limited per program;
that all programs at once fit into the machine is up to the caller, who chooses their number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import marshal
import math
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridrl.errors import ConfigError, RewardError, UnsupportedMachineError
from hybridrl.sandbox.checked_tests import CheckedTest, check_test
from hybridrl.sandbox.supervisor_process import SandboxSupervisor
from hybridrl.system.memory_cgroup import make_memory_cgroup

UNCHECKED = "nothing was checked"
"""Why a test is not passed that compared nothing; `confined.judge` says so."""
_OUTPUT_KIB = 1 << 14  # of the judge's lines
_log = logging.getLogger(__name__)

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")

_LEVEL_NAMES = {
    "root": "namespaces",
    "user": "namespaces of an ordinary user",
    "none": "no namespaces",
}

_probing = threading.Lock()


@dataclass(frozen=True)
class SandboxLimits:
    """The resources that a program may use.

    Attributes:
        wall_s: seconds from its start.
        cpu_s: seconds of processor time, all threads together.
        memory_mib: address space in MiB, of which the bare interpreter takes less than 20. Where
            there are control groups (`make_memory_cgroup`), also all memory that it takes in any
            way.
        threads: how many, the first one counted.
        file_mib: size of a file in MiB.
        scratch_mib: size of all files in MiB; only with namespaces.
        open_files: open files, the three standard ones counted.
        output_kib: of the standard output, and of the standard error output, in KiB.

    Raises:
        ConfigError: if one of them is not positive.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 1024
    threads: int = 16
    file_mib: int = 16
    scratch_mib: int = 64
    open_files: int = 64
    output_kib: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf or (field.name != "wall_s" and value != int(value)):
                kind = "number" if field.name == "wall_s" else "whole number"
                raise ConfigError(
                    f"`SandboxLimits.{field.name}` is {value}, expected a {kind} greater than 0."
                )


@dataclass(frozen=True)
class SandboxResult:
    """The end of a program and its output.

    Attributes:
        ended: `ok` (exit code 0), `error` (another exit code), `memory` (an uncaught
            `MemoryError`), `wall_time`, `cpu_time` or `output` (stopped at that limit), or
            `signal`.
        code: the exit code or the number of the signal.
        stdout, stderr: what it wrote, up to the limit, with U+FFFD for what is not UTF-8.
        seconds: from its start to its end.
        cpu_s, program_cpu_s: processor seconds, and those of a program that was tested.
        was_killed: whether a program that was tested ended by a signal, and not by ours.
    """

    ended: Literal["ok", "error", "memory", "wall_time", "cpu_time", "output", "signal"]
    code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_s: float = 0.0
    program_cpu_s: float = 0.0
    was_killed: bool = False

    def is_repeatable(self, limits: SandboxLimits) -> bool:
        """Return whether it would end like this on a machine half as fast and short of memory, too:
        far from the time limits, and not by a signal, which the system may have sent."""
        share = max(self.cpu_s, self.program_cpu_s) / limits.cpu_s
        is_quick = max(share, self.seconds / limits.wall_s) < 0.5
        return is_quick and not self.was_killed and self.ended in ("ok", "error", "output")


@dataclass(frozen=True)
class Verdict:
    """The results of a program's tests.

    Attributes:
        passed: of each test, in order.
        reasons: why each test was not passed, empty for one that was.
        vacuous: of each test, whether a comparison in it would have held of anything.
        is_slow: whether the tests, not the program, took longer than the limits allow, so that they
            were stopped; those that were not reached are not passed.
        is_repeatable: see `SandboxResult`.
    """

    passed: list[bool]
    reasons: list[str]
    vacuous: list[bool] = dataclasses.field(default_factory=list)
    is_slow: bool = False
    is_repeatable: bool = False


@dataclass(frozen=True)
class SandboxConfinement:
    """The mechanisms that confine programs on this machine, beside seccomp and resource limits.

    Attributes:
        namespaces: `root`, made by right; `user`, made within a user namespace; or `none`.
        landlock: version of Landlock, 0 if there is none.
        memory_groups: whether control groups bound all memory of a program.
    """

    namespaces: Literal["root", "user", "none"]
    landlock: int
    memory_groups: bool = False

    def __str__(self) -> str:
        """Return one line for the user: which mechanisms confine programs, and what they leave
        unlimited."""
        parts = ["namespaces"] if self.namespaces != "none" else []
        parts += [*(["Landlock"] if self.landlock else []), "seccomp"]
        parts += ["control groups"] if self.memory_groups else []
        said = f"programs run confined by {' + '.join(parts)}"
        return said if self.namespaces != "none" else f"{said}, without a limit on the disk"


def run_python(
    source: str, stdin: str = "", *, limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a Python program in the sandbox; threads may call this concurrently.

    Raises:
        UnsupportedMachineError: if this machine cannot confine programs.
        RewardError: if the sandbox itself was killed.
    """
    limits = limits or SandboxLimits()
    return _run_confined(find_confinement().namespaces, source, stdin, limits)[0]


def judge_program(
    program: str, tests: Sequence[str], limits: SandboxLimits | None = None
) -> Verdict:
    """Run tests of a program, in another process than its own; see `confined.judge`. Whatever the
    program does, it can at most fail them.

    Args:
        program: Python. The empty program is the one that no sound test passes.
        tests: sources with asserts, classes of `unittest`, tests of pytest, or doctests.
        limits: of the program, and of the tests.

    Raises:
        SyntaxError, ValueError: if a test is neither Python nor a doctest.
        UnsupportedMachineError: if this machine cannot confine programs.
        RewardError: if the sandbox itself was killed.
    """
    limits = dataclasses.replace(limits or SandboxLimits(), output_kib=_OUTPUT_KIB)
    checked = [check_test(test) for test in tests]
    outcome = _run_confined(find_confinement().namespaces, program, "", limits, checked)[0]
    passed, vacuous = [False] * len(tests), [False] * len(tests)
    reasons = ["it was stopped before its end"] * len(tests)
    for line in outcome.stdout.splitlines():
        number, has_passed, found, reason = json.loads(line)
        passed[number], vacuous[number], reasons[number] = has_passed, found > 0, reason
    is_stopped = outcome.ended in ("wall_time", "cpu_time")
    is_slow = is_stopped and outcome.cpu_s >= outcome.program_cpu_s
    return Verdict(passed, reasons, vacuous, is_slow, outcome.is_repeatable(limits))


def find_confinement() -> SandboxConfinement:
    """Find the best confinement that this machine allows, by trying each level once.

    Raises:
        UnsupportedMachineError: if nothing does; says what is missing.
    """
    with _probing:
        return _try_confinement_levels()


@functools.cache
def _try_confinement_levels() -> SandboxConfinement:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise UnsupportedMachineError(
            f"Programs can be run safely only on Linux on x86-64 or aarch64, and this is "
            f"{sys.platform} on {platform.machine()}. Use reward functions that run no programs."
        )
    missing: list[str] = []
    levels: list[Literal["root", "user", "none"]] = ["root", "user", "none"]
    for level in levels if os.geteuid() == 0 else levels[1:]:
        try:
            _, landlock, has_group = _run_confined(level, "", "", SandboxLimits())
        except (_ConfinementRefusedError, OSError) as refusal:
            missing.append(f"{_LEVEL_NAMES[level]}: {refusal}")
            continue
        found = SandboxConfinement(level, landlock, has_group)
        _log.info("%s (%s, Landlock version %s). %s", found, _LEVEL_NAMES[level], landlock, missing)
        return found
    raise UnsupportedMachineError(
        "Programs cannot be run safely on this machine, so none is run. Tried "
        + "; ".join(missing)
        + ". The sandbox needs Linux 5.13 or newer with seccomp, an interpreter whose folders "
        "every user may read, and either user namespaces or Landlock; in a container, the "
        "container's own seccomp profile must allow one of them."
    )


class _ConfinementRefusedError(Exception):
    """The kernel refused the requested confinement, so the program was not run."""


def _run_confined(
    level: str,
    source: str,
    stdin: str,
    limits: SandboxLimits,
    tests: Sequence[CheckedTest] | None = None,
) -> tuple[SandboxResult, int, bool]:
    """Run a program at a level of confinement, and tests of it if there are any; return the version
    of Landlock, too, and whether the program had a memory group.

    Raises:
        _ConfinementRefusedError: if the kernel does not provide that level.
        RewardError: if the supervisor died without a report.
    """
    libraries, search_path = _find_library_folders()
    fields = {
        "source": source,
        "stdin": stdin.encode("utf-8", "replace"),
        "level": level,
        "limits": dataclasses.asdict(limits),
        "libraries": libraries,
        "search_path": search_path,
        "temporary": tempfile.gettempdir(),
        "is_judged": tests is not None,
    }
    job = [marshal.dumps(fields)]
    job += [] if tests is None else [marshal.dumps([tuple(test[:5]) for test in tests])]
    with ExitStack() as opened:
        group = make_memory_cgroup(limits.memory_mib << 20)
        if group is not None:
            opened.callback(group.close)
        entrance = None if group is None else group.entrance
        run = SandboxSupervisor(job, limits.wall_s, limits.output_kib * 1024, entrance)
        try:
            run.finish()
        finally:
            run.close()
        is_full = group is not None and group.kills() > 0
    if not run.report:
        raise RewardError(
            "The process that watches over a sandboxed program died. If the machine is out of "
            "memory, lower `reward.processes`.\n" + run.stderr.decode("utf-8", "replace")[-2000:]
        )
    report = marshal.loads(bytes(run.report))
    if "failure" in report:
        raise _ConfinementRefusedError(report["failure"])
    return _build_result(report, run, limits, is_full), report["landlock"], group is not None


def _build_result(
    report: dict[str, Any], run: SandboxSupervisor, limits: SandboxLimits, is_full: bool
) -> SandboxResult:
    status = report["status"]
    stdout, stderr = (bytes(o).decode("utf-8", "replace") for o in (run.stdout, run.stderr))
    code = os.waitstatus_to_exitcode(status)
    ended: Any = "ok" if code == 0 else "error" if code > 0 else "signal"
    if run.is_over:
        ended = "output"
    elif is_full and -code == signal.SIGKILL:
        ended = "memory"
    elif report["stopped"] == "wall":
        ended = "wall_time"
    # The kernel's two ways of counting time differ by a tenth of a second and more.
    elif -code == signal.SIGXCPU or (-code == signal.SIGKILL and report["cpu_s"] > limits.cpu_s):
        ended = "cpu_time"
    elif code == 1 and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        ended = "memory"
    figures = [report[name] for name in ("seconds", "cpu_s", "program_cpu_s", "was_killed")]
    return SandboxResult(ended, abs(code), stdout, stderr, *figures)


@functools.cache
def _find_library_folders() -> tuple[list[str], list[str]]:
    """Return the folders that a program may read, and those of them that hold installed
    packages."""
    packages = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    standard = [p for p in sys.path if p not in packages and Path(p, "encodings").is_dir()]
    wanted = [*_SYSTEM_LIBRARIES, *standard, *(f"{p}/lib-dynload" for p in standard), *packages]
    folders: list[str] = []
    for folder in sorted({str(Path(f).absolute()) for f in wanted if Path(f).is_dir()}):
        if not any(folder.startswith(f"{other}/") for other in folders):
            folders.append(folder)
    return folders, packages

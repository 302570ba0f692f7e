"""Linux system calls that Python's standard library lacks, and reading whole messages of pipes."""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_MACHINES = ("x86_64", "aarch64")
_SYSCALL_NUMBERS = {  # of the system calls that libc has no function for, by machine
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "seccomp": (317, 277),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
_PIECE = 1 << 20
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SETUID = 7
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 38

libc = ctypes.CDLL(None, use_errno=True)


def read_fully(source: int, size: int) -> bytes:
    """Return `size` bytes of a pipe; fewer if it ends before."""
    pieces = bytearray()
    while len(pieces) < size and (piece := os.read(source, min(size - len(pieces), _PIECE))):
        pieces += piece
    return bytes(pieces)


def read_message(source: int) -> bytes:
    """Return what a pipe has behind the number of its bytes; end this process if the pipe ends
    before, for whoever wrote it is gone."""
    header = read_fully(source, 8)
    size = int.from_bytes(header, "little")
    content = read_fully(source, size)
    if len(header) < 8 or len(content) < size:
        os._exit(1)
    return content


def find_machine_index() -> int:
    """Return this machine's column in tables of system calls: 0 on x86-64, 1 on aarch64.

    Raises:
        OSError: on other machines.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(f"{machine} is no machine that the sandbox knows ({', '.join(_MACHINES)})")
    return _MACHINES.index(machine)


def call_kernel(name: str, *arguments: Any) -> int:
    """Make a system call; integers are passed as C longs.

    Raises:
        OSError: if the kernel refuses; names the call.
    """
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check_result(
        name, libc.syscall(ctypes.c_long(_SYSCALL_NUMBERS[name][find_machine_index()]), *plain)
    )


def check_result(name: str, result: int) -> int:
    """Return the result of a C function; raise an OSError that names the function if it is
    negative."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def drop_privileges() -> None:
    """Drop all capabilities for good, so that no program started later can regain them.

    It also closes this process to `ptrace` and to readers of its memory, and keeps it from leaving
    core dumps.
    """
    check_result("prctl", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _set_capabilities(0)
    check_result("prctl", libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def switch_user(user: int, folders: list[str]) -> None:
    """Turn a root process into one of an ordinary user without capabilities.

    Args:
        folders: if that user may not enter one of them, files are still opened as root without
            capabilities would open them: by their owner's rights, not beyond them.

    Raises:
        OSError: if the kernel refuses.
    """
    check_result("prctl", libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if not all(os.access(folder, os.R_OK | os.X_OK) for folder in folders):
        _set_capabilities(1 << _CAP_SETUID)
        libc.setfsuid(0)
        if libc.setfsuid(-1) != 0:  # this changes nothing and says who it is
            raise OSError("setfsuid: this process may not open files as root")
    _set_capabilities(0)
    # After a change of user, this gives the process its files in /proc back.
    check_result("prctl", libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def _set_capabilities(capabilities: int) -> None:
    """Set the effective and permitted capabilities to exactly these."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call_kernel("capset", header, (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0))


def set_parent_death_signal() -> None:
    """Have the kernel kill this process when its parent ends; a change of user undoes this."""
    check_result("prctl", libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0))

"""Namespaces for the program: its own mounts, processes, network, host name and IPC objects.

The program sees a root folder of a few entries, made of memory: the interpreter's libraries, bound
read-only, two devices, and /tmp, which is its scratch folder and disappears with it. (Libraries
that are installed under /tmp are read-only there, like all others.) There is no /proc, no /sys, no
/etc and no home.
"""

# Importing pathlib would take as long as all the rest.
# ruff: noqa: PTH102, PTH103, PTH123
from __future__ import annotations

import ctypes
import os

from .linux_kernel import call_kernel, check_result, libc

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_ALL_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4

_NOBODY = 65534
_DEVICES = ("/dev/null", "/dev/urandom")
_MAX_SCRATCH_FILES = 4096  # in the scratch folder
SCRATCH_FOLDER = "/tmp"


def enter_namespaces(with_user: bool) -> None:
    """Move this process into new namespaces; processes it forks are in a new PID namespace.

    Args:
        with_user: also into a new user namespace, which gives an ordinary user the right to the
            others. Where that is wanted, nothing but the caller's own user exists in it.

    Raises:
        OSError: if the kernel or the container refuses.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _ALL_NAMESPACES | (_CLONE_NEWUSER if with_user else 0)
    check_result("unshare", libc.unshare(flags))
    if with_user:
        _write_text("/proc/self/setgroups", "deny")
        _write_text("/proc/self/uid_map", f"{_NOBODY} {user} 1")
        _write_text("/proc/self/gid_map", f"{_NOBODY} {group} 1")
    check_result("sethostname", libc.sethostname(b"sandbox", 7))


def replace_root(libraries: list[str], scratch_bytes: int) -> None:
    """Replace the root folder of this process and of all its future children with the program's.

    Raises:
        OSError: if a mount is refused, or a library's folder cannot be reached.
    """
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)  # what is mounted from here on stays in here
    # The new root needs a folder to be mounted on that hides none of the libraries.
    root = "/proc"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.umask(0o022)  # whatever the caller's is, the program's user may read what is made here
    os.mkdir(f"{root}/dev")
    for device in _DEVICES:
        os.close(os.open(root + device, os.O_CREAT | os.O_WRONLY))
        _mount(device, root + device, None, _MS_BIND)
    os.mkdir(root + SCRATCH_FOLDER)
    limits = f"size={scratch_bytes},nr_inodes={_MAX_SCRATCH_FILES},mode=1777"
    _mount("tmpfs", root + SCRATCH_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, limits)
    # After all others: a library under /tmp or /dev is seen there, and its mount hides nothing.
    for library in libraries:
        os.makedirs(root + library, exist_ok=True)
        _mount(library, root + library, None, _MS_BIND | _MS_REC)
        _make_read_only(root + library, _AT_RECURSIVE)
    _make_read_only(root)
    os.chdir(root)
    call_kernel("pivot_root", b".", b".")  # the old root is now mounted over the new one
    check_result("umount2", libc.umount2(b".", _MNT_DETACH))
    os.chdir(SCRATCH_FOLDER)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if text is None else text.encode() for text in (source, kind, options)]
    result = libc.mount(encoded[0], target.encode(), encoded[1], ctypes.c_ulong(flags), encoded[2])
    check_result(f"mount of {source or kind or 'nothing'} on {target}", result)


def _make_read_only(target: str, flags: int = 0) -> None:
    attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # set, clear, propagation, user namespace
    size = ctypes.sizeof(request)
    call_kernel("mount_setattr", _AT_FDCWD, target.encode(), flags, request, size)


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)

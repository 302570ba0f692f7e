"""Landlock rules: which files the program may open, whatever their permissions are.

See https://docs.kernel.org/userspace-api/landlock.html. Landlock says nothing about a file's
existence, size and times (`stat`), nor about changing its permissions; the latter is up to
`seccomp`.
"""

from __future__ import annotations

import ctypes
import os
import struct

from .linux_kernel import call_kernel

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_EXECUTE, _MAKE_CHAR, _MAKE_SOCK = 1 << 0, 1 << 6, 1 << 9
_MAKE_FIFO, _MAKE_BLOCK, _TRUNCATE = 1 << 10, 1 << 11, 1 << 14
_FORBIDDEN_IN_SCRATCH = _EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK
_FILE_RIGHTS = (  # all there are, by the version that brought them
    (1, (1 << 13) - 1),
    (2, 1 << 13),  # move and link between folders
    (3, _TRUNCATE),
    (5, 1 << 15),  # ioctl on devices
)


def find_landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if it has none or does not use it."""
    try:
        return call_kernel("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict_files(read_only: list[str], scratch: str) -> None:
    """Confine this process for good to reading these folders and writing in `scratch`.

    From version 4 on it also refuses TCP, and from version 6 on signals to processes outside and
    abstract Unix sockets made there.

    Raises:
        OSError: if the kernel refuses, or a folder does not exist.
    """
    has = find_landlock_version()
    rights = sum(bits for since, bits in _FILE_RIGHTS if has >= since)
    fields = [rights, 3 if has >= 4 else 0, 3 if has >= 6 else 0]  # files, network, scopes
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    size = 24 if has >= 6 else 16 if has >= 4 else 8
    ruleset = call_kernel("landlock_create_ruleset", attributes, size, 0)
    for folder in read_only:
        _add_path_rule(ruleset, folder, _READ_FILE | _READ_DIR)
    _add_path_rule(ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
    _add_path_rule(ruleset, "/dev/urandom", _READ_FILE)
    _add_path_rule(ruleset, scratch, rights & ~_FORBIDDEN_IN_SCRATCH)
    call_kernel("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _add_path_rule(ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, file))
    call_kernel("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
    os.close(file)

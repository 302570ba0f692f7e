"""`/dev/stdin` and the like, by name, for a program that has neither /proc nor these devices."""

from __future__ import annotations

import builtins
import io
import os

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_DESCRIPTORS = {
    name: descriptor
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr"))
    for name in (f"/dev/{stream}", f"/dev/fd/{descriptor}", f"/proc/self/fd/{descriptor}")
}


def install() -> None:
    """Has `open` find the standard input and outputs by these names, in `io` as well."""
    plain_open = io.open

    def open(file: Any, *arguments: Any, **options: Any) -> Any:
        name = os.fspath(file) if isinstance(file, os.PathLike) else file
        if isinstance(name, str) and name in _DESCRIPTORS:
            file = os.dup(_DESCRIPTORS[name])
        return plain_open(file, *arguments, **options)

    open.__doc__ = plain_open.__doc__
    builtins.open = io.open = open

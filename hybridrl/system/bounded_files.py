"""Reads files that somebody else may have made, such as those of a run's folder that was sent.

Only regular files are read, no links, pipes or devices, and only so many bytes. JSON and YAML that
are nested too deeply, and YAML that refers back to itself, are refused: a few hundred bytes of
aliases stand for a table that fills any memory.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from hybridrl.system.formatting import format_bytes
from hybridrl.system.locations import Location, RemotePath

MOST_BYTES = 64 << 20
"""Largest file that is read whole."""
MOST_YAML_BYTES = 512 << 10
"""Reading YAML takes seconds for a megabyte."""
MOST_LINE_BYTES = 64 << 20
"""Longer lines are left out."""
_MOST_LEVELS = 100
_BLOCK_BYTES = 1 << 20
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The fast one, which deep nesting would crash: `load_yaml` looks first."""


def open_regular(file: Path) -> IO[bytes]:
    """Open a regular file for reading; wait for no pipe and follow no link.

    Raises:
        OSError: if it is not there, or is something else.
    """
    if file.is_symlink():
        raise OSError("it is a link, and only files of the folder itself are read")
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file but a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_text(file: Location, most_bytes: int = MOST_BYTES) -> str:
    """Return a whole file, as UTF-8.

    Raises:
        OSError: if it cannot be read, is no regular file, or is larger.
        ValueError: if it is no UTF-8.
    """
    if isinstance(file, RemotePath):
        content = file.read_range(0, most_bytes + 1)
    else:
        with open_regular(file) as opened:
            content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it has more than the {format_bytes(most_bytes)} that are read")
    return content.decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return what JSON means.

    Raises:
        ValueError: if it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_json(file: Location) -> Any:
    """Return what a JSON file holds. Raises as `read_text`, and `ValueError` for other content."""
    return parse_json(read_text(file))


def load_object(file: Location) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises as `load_json`."""
    found = load_json(file)
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def load_yaml(file: Location) -> Any:
    """Return what a YAML file without aliases holds.

    Raises:
        OSError: see `read_text`.
        ValueError: if it cannot be read, has an alias, or is nested too deeply.
    """
    text, level = read_text(file, MOST_YAML_BYTES), 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {event.start_mark.line + 1} has an alias (*{event.anchor})")
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > _MOST_LEVELS:
                raise ValueError("it is nested too deeply")
        return yaml.load(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def lines_from(opened: IO[bytes], most_line_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines from here on, the last one also where its end is missing; of a line that is
    too long nothing but empty bytes for each part."""
    while line := opened.readline(most_line_bytes):
        is_whole = line.endswith(b"\n")
        if len(line) < most_line_bytes or is_whole:
            yield line
            continue
        while part := opened.readline(_BLOCK_BYTES):  # the rest of it
            if part.endswith(b"\n"):
                break


def read_end(file: Path, most_bytes: int) -> bytes:
    """Return the end of a file, from the beginning of a line on.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(file) as opened:
        start_near_end(opened, most_bytes)
        return opened.read(most_bytes)


def start_near_end(opened: IO[bytes], most_bytes: int) -> int:
    """Go to the first line that begins in the last so many bytes; return where that is."""
    size = opened.seek(0, os.SEEK_END)
    opened.seek(max(0, size - most_bytes))
    if size > most_bytes:
        opened.readline(most_bytes)
    return opened.tell()

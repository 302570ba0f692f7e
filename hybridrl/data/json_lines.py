"""Reading files of one JSON object per line, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridrl.errors import DataError, nearest

Location = tuple[Path, int]


def read_json_lines(files: list[Path], required: Mapping[str, str]) -> pa.Table:
    """Reads the files into one table; a key that a row lacks is null, empty lines are skipped.

    `required` maps the name of a setting to the column that it names; every row must have it.

    Raises:
        DataError: naming file and line, if a line is no JSON object, lacks a required column, or
            holds a value of another type than the rows above it.
    """
    rows: list[dict[str, Any]] = []
    locations: list[Location] = []
    for file in files:
        for line, row in _rows_of(file):
            check_columns(row, required, f"{file}, line {line},")
            rows.append(row)
            locations.append((file, line))
    names = {name: None for row in rows for name in row}
    return pa.table({name: _column(name, rows, locations) for name in names})


def check_columns(columns: Collection[str], required: Mapping[str, str], place: str) -> None:
    """Raises a `DataError` that names the setting and the nearest column if one is missing."""
    for setting, name in required.items():
        if name not in columns:
            raise DataError(
                f"{place} has no column `{name}` (`{setting}`); it has "
                f"{', '.join(columns) or 'none'}." + nearest(name, columns)
            )


def _rows_of(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            for line, text in enumerate(stream, start=1):
                if text.strip():
                    yield line, _row(file, line, text)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"`{file}` (`data.path`) cannot be read: {error}") from error


def _row(file: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError as error:  # broken JSON, or bytes that are no text
        hint = ""
        if line == 1 and text.strip() in (b"[", b"{"):
            hint = " The file looks like one large JSON value; write one object per line instead."
        raise DataError(f"{file}, line {line}, is no valid JSON: {error}.{hint}") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{file}, line {line}, holds a JSON {_json_name(row)}, expected an object such as "
            '{"prompt": "17+58=", "answer": "75"}; a file has one object per line.'
        )
    return row


def _column(name: str, rows: list[dict[str, Any]], locations: list[Location]) -> pa.Array:
    values = [row.get(name) for row in rows]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError) as error:
        bad = _first_misfit(values)
        file, line = locations[bad]
        raise DataError(
            f"{file}, line {line}, has {values[bad]!r} in the column `{name}`, which does not fit "
            f"the type of the rows above it: {error}. Give the column one type in all rows."
        ) from error


def _first_misfit(values: list[Any]) -> int:
    """The number of the first value that Arrow cannot put into one column with those before it."""
    low, high = 0, len(values)  # the first `low` values fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pa.array(values[:middle])
            low = middle
        except (pa.ArrowException, OverflowError):
            high = middle
    return high - 1


def _json_name(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")

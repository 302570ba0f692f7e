"""Reading files with one JSON object per line; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridrl.batch.arrow_columns import json_column
from hybridrl.config.setting import Setting
from hybridrl.data.encoding import shorten_value
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DataRow
from hybridrl.data.table_columns import (
    arrow_column,
    check_required_columns,
    escape_surrogates,
    read_cells,
)
from hybridrl.errors import DataError, RowError

FileLine = tuple[Path, int]
JsonLine = tuple[Path, int, bytes]
"""File, number and text of a line, or of a value in a JSON document."""
_GZIP_MAGIC = b"\x1f\x8b"
_SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)
_BETWEEN = re.compile(r"[\s,]*")
"""Between two values of an array."""
_CONVERSION_ERRORS = (pa.ArrowException, OverflowError, UnicodeError, RecursionError)
"""What Arrow raises of values that no column can hold together."""


class NumberLiteral(float):
    """A float that keeps its spelling in the file: as a reference answer, `0.50` is not `0.5`."""

    text: str

    def __new__(cls, text: str) -> NumberLiteral:
        number = super().__new__(cls, text)
        number.text = text
        return number


def list_json_lines(files: list[Path], setting: Setting) -> Iterator[JsonLine]:
    """Yield the lines of the files that are not empty.

    Args:
        setting: Names the files, for messages.

    Raises:
        DataError: if a file cannot be read.
    """
    return ((file, line, text) for file in files for line, text in _lines_of(file, setting))


def read_json_lines(
    lines: Iterable[JsonLine],
    required: Mapping[str, str],
    named: Mapping[str, bool] | None = None,
    refused: RefusedRows | None = None,
) -> pa.Table:
    """Read lines into one table; a missing key becomes null.

    A column that no setting names, and whose values no column can hold together, is left out; the
    log says so.

    Args:
        required: The column that each setting names; every row must have it. Dots lead into
            objects: `reward_model.ground_truth`.
        named: See `hybridrl.data.data_files.read_found_rows`.
        refused: Gets lines that are no JSON object or lack a required column, which are rows of
            nulls in the table; None: they are an error.

    Raises:
        DataError: naming file and line, if a line is refused.
    """
    refused, named = RefusedRows() if refused is None else refused, named or {}
    asked = dict.fromkeys([*required.values(), *named])
    rows: list[dict[str, Any]] = []
    locations: list[FileLine] = []
    for file, line, text in lines:
        row: dict[str, Any] = {}
        try:
            read = _parse_row(file, line, text)
            check_required_columns(read, required, f"{file}, line {line},")
            for name in asked if _SURROGATE.search(text) else ():
                _check_characters(file, line, name, *read_cells([read], name))
            row = read
        except DataError as error:
            refused.refuse(len(rows) + 1, error)
        rows.append(row)
        locations.append((file, line))
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys([*(name for row in rows for name in row), *required.values()]):
        values = read_cells(rows, name)
        if named.get(name):
            values = refused.map(partial(_format_literal, name), values, locations)
        # A value must not depend on which rows are read with it, as its Arrow type would.
        is_text = all(isinstance(value, str | None) for value in values)
        try:
            name.encode()
            keeps_cells = name in asked and not is_text
            columns[name] = json_column(values) if keeps_cells else arrow_column(values)
        except _CONVERSION_ERRORS as error:
            complaint = _explain_misfit(name, values, locations, error)
            shown = escape_surrogates(name)
            refused.leave_out(shown, f"The data's column `{shown}` is left out. {complaint}")
    refused.kept(len(rows))
    return pa.table(columns)


def _lines_of(file: Path, setting: Setting) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            lines = ((n, text) for n, text in enumerate(stream, start=1) if text.strip())
            if (first := next(lines, None)) is None:
                return
            if _begins_document(file, first[1]):
                rest = b"".join(text for _, text in lines)
                yield from _values_of(file, (first[1] + rest).decode("utf-8-sig"), setting)
            else:
                yield first
                yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"`{file}` (`{setting}`) cannot be read: {error}") from error


def _begins_document(file: Path, line: bytes) -> bool:
    """Return whether the first line begins an array of objects, or an object of many lines."""
    text = line.strip().removeprefix(b"\xef\xbb\xbf")
    if text.startswith(b"["):
        return text[1:].lstrip()[:1] in (b"", b"{", b"]")
    if not text.startswith(b"{") or ".json" not in file.suffixes:
        return False
    try:
        json.loads(text)
    except ValueError:
        return not text.endswith(b"}")
    return False


def _values_of(file: Path, text: str, setting: Setting) -> Iterator[tuple[int, bytes]]:
    """The values in an array, or one after the other, each with the line where it begins."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    is_array = text.lstrip().startswith("[")
    place = text.index("[") + 1 if is_array else 0
    while (begin := _BETWEEN.match(text, place).end()) < len(text):  # type: ignore[union-attr]
        if is_array and text[begin] == "]":
            return
        line, counted = line + text.count("\n", counted, begin), begin
        try:
            _, place = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:  # nobody knows where the next one begins
            raise DataError(f"{file}, line {line}, is no valid JSON: {error}.") from error
        yield line, text[begin:place].encode()
    if is_array:
        raise DataError(f"`{file}` (`{setting}`) holds a JSON array that does not end.")


def _parse_row(file: Path, line: int, text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(
            text.decode("utf-8-sig"),
            object_pairs_hook=_build_unique_object,
            parse_float=NumberLiteral,
        )
    except UnicodeDecodeError as error:
        cure = "Save the file as UTF-8."
        if text.startswith(_GZIP_MAGIC):
            cure = f"It is compressed by gzip: name it `{file.name}.gz`."
        raise RowError(
            f"{file}, line {line}, is no text in UTF-8 (byte {error.start + 1} of the line: "
            f"{error.reason}). {cure}",
            "that are no text in UTF-8",
        ) from error
    except (ValueError, RecursionError) as error:  # broken JSON
        what, hint = str(error), ""
        if isinstance(error, json.JSONDecodeError):  # its own line is always the first
            what = f"{error.msg} (column {error.colno})"
        if not text.lstrip(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[", b'"')):
            hint = (
                f" It begins with {shorten_value(text.decode('utf-8-sig').strip())}; a line is one"
            )
            hint += " object in braces. Write rows of another kind, such as CSV, as JSON lines."
        raise RowError(
            f"{file}, line {line}, is no valid JSON: {what}.{hint}", "that are no valid JSON"
        ) from error
    if not isinstance(row, dict):
        raise RowError(
            f"{file}, line {line}, holds a JSON {_json_type_name(row)}, expected an object such as "
            '{"prompt": "17+58=", "answer": "75"}; a file has one object per line.',
            "that are no JSON object",
        )
    return row


def _check_characters(file: Path, line: int, column: str, value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = shorten_value(error.object[max(0, error.start - 40) : error.end])
        raise RowError(
            f"{file}, line {line}, has half of a surrogate pair, which is no character, in the "
            f"column `{column}`, at the end of {shown}. Remove it.",
            "with half of a surrogate pair",
        ) from error


def _build_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a key that occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _format_literal(column: str, _: DataRow, value: Any, place: FileLine) -> Any:
    """Return a number or boolean as the file spells it, an array or object as JSON text, and any
    other value unchanged.

    Raises:
        DataError: for what is not a number.
    """
    if isinstance(value, NumberLiteral):
        return value.text
    if isinstance(value, float):  # the decoder's own: NaN or infinity
        file, line = place
        raise RowError(
            f"{file}, line {line}, has {value} in the column `{column}`, which nothing equals. "
            "Leave the row out.",
            "with an answer that is no number",
        )
    return json.dumps(value) if isinstance(value, bool | int | list | dict) else value


def _explain_misfit(
    name: str, values: list[Any], locations: list[FileLine], error: Exception
) -> str:
    """Return a sentence that explains why the values do not fit into one column."""
    if _fits_one_column(values):
        return "Its name has half of a surrogate pair, which is no character."
    bad = _find_first_misfit(values)
    name, (file, line) = escape_surrogates(name), locations[bad]
    shown = shorten_value(values[bad])
    if _fits_one_column(values[bad : bad + 1]):
        above = next(value for value in values if value is not None)
        here, there = _json_type_name(values[bad]), _json_type_name(above)
        said = f"here a JSON {here}, there a JSON {there}" if here != there else str(error)
        why = f"does not fit the type of the rows above it: {said}. Give the column one type in"
        return f"{file}, line {line}, has {shown} in the column `{name}`, which {why} all rows."
    if isinstance(error, UnicodeError):
        error = UnicodeError("half of a surrogate pair, which is no character")
    return (
        f"{file}, line {line}, has {shown} in the column `{name}`, which cannot be kept: {error}."
    )


def _fits_one_column(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except _CONVERSION_ERRORS:
        return False
    return True


def _find_first_misfit(values: list[Any]) -> int:
    """Return the index of the first value that Arrow cannot put into one column with those before
    it."""
    numbers = range(1, len(values))  # of values from the first on; all of them do not fit
    return bisect_left(numbers, True, key=lambda number: not _fits_one_column(values[:number]))


def _json_type_name(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    names |= {NumberLiteral: "number", dict: "object"}
    return names.get(type(value), "null")

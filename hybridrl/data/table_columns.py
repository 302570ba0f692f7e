"""Finding columns of the data by name; dots lead into objects: `reward_model.ground_truth`."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hybridrl.batch.arrow_columns import json_column, python_values
from hybridrl.errors import ConfigError, DataError, HybridRLError, RowError, suggest_name

TOOLS = "tools"
"""What the column of tools is called unless `data.tools_column` says otherwise."""

_LISTS_OF_OBJECTS = {pa.json_(), pa.list_(pa.null())}
"""Types of a column of them, the second of rows whose lists are empty."""
_ABSENT = object()
_OF_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_log = logging.getLogger(__name__)


def check_required_columns(
    columns: Collection[str] | Mapping[str, Any], required: Mapping[str, str], place: str
) -> None:
    """Check that the columns that the settings name exist.

    Args:
        columns: Names; or a row, into whose objects a name with dots may lead.
        place: Begins the sentence.

    Raises:
        DataError: names the setting and the nearest column.
    """
    for setting, name in required.items():
        if name in columns or (
            isinstance(columns, Mapping)
            and _read_nested_value(columns, name, _ABSENT) is not _ABSENT
        ):
            continue
        there = [escape_surrogates(column) for column in columns]
        cure = f" If no row has an answer, set {setting}=null."
        raise RowError(
            f"{place} has no column `{name}` (`{setting}`); it has "
            f"{', '.join(there[:40]) or 'none'}."
            + suggest_name(name, there)
            + (cure if setting.endswith("answer_column") else ""),
            f"without the column `{name}`",
        )


def escape_surrogates(name: str) -> str:
    """Return a name that a console can print: halves of surrogate pairs are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def read_cells(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the values of a column, None for rows that lack it."""
    if "." not in name:
        return [row.get(name) for row in rows]
    return [row[name] if name in row else _read_nested_value(row, name) for row in rows]


def arrow_column(values: Sequence[Any]) -> pa.Array:
    """Return the values as a column: lists of objects, such as messages and tools, as JSON."""
    listed = [value for value in values if value is not None]
    objects = [one for value in listed if isinstance(value, list) for one in value]
    is_json = any(objects) and all(isinstance(value, list) for value in listed)
    if is_json and all(isinstance(one, dict | None) for one in objects):
        return json_column(values)
    return pa.array(values)


def table_of(
    rows: Sequence[Mapping[str, Any]], complaint: str, kind: type[HybridRLError] = ConfigError
) -> pa.Table:
    """Return rows as a table; a key that a row lacks is null.

    Raises:
        kind: if no column can hold the values of a key; the sentence begins with `complaint`.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: arrow_column([row.get(name) for row in rows]) for name in names})
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise kind(f"{complaint}: {error}") from error


def add_nested_columns(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Return the table with a column for each dotted name that leads into an object."""
    for name in names:
        head, *inner = name.split(".")
        if name in table.column_names or not inner or head not in table.column_names:
            continue
        try:
            found = pc.struct_field(table.column(head), inner)
        except (pa.ArrowException, NotImplementedError):  # it is no object, or has no such key
            continue
        table = table.append_column(name, found)
    return table


def without_views(table: pa.Table) -> pa.Table:
    """Return the table without views, as which Polars writes texts: Arrow cannot take rows of
    them."""
    fields = [field.with_type(_type_without_views(field.type)) for field in table.schema]
    return table if fields == list(table.schema) else table.cast(pa.schema(fields))


def _type_without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_type_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        inner = _type_without_views(kind.value_type)
        return kind if inner == kind.value_type else pa.large_list(inner)
    return _OF_VIEWS.get(kind, kind)


def without_mixed_columns(
    tables: Sequence[pa.Table], what: str, named: Mapping[str, bool] | None = None
) -> list[pa.Table]:
    """Drop columns of different types with a warning.

    Args:
        what: Has these values, for the warning.
        named: See `hybridrl.data.data_files.read_found_rows`.
    """
    mixed, named = [], named or {}
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        mine = [table for table in tables if name in table.column_names]
        kinds = {table.schema.field(name).type for table in mine} - {pa.null()}
        if len(kinds) < 2 or all(map(_is_text, kinds)):
            continue
        if name in named or kinds == _LISTS_OF_OBJECTS:
            tables = [_with_json_column(table, name, named.get(name)) for table in tables]
            continue
        try:
            pa.concat_tables([t.select([name]) for t in mine], promote_options="permissive")
        except (pa.ArrowException, OverflowError):
            mixed.append(name)
    if mixed:
        _log.warning(
            "The data's %s left out: %s have values of different types there.",
            f"column `{mixed[0]}` is" if len(mixed) == 1 else f"columns {', '.join(mixed)} are",
            what,
        )
    return [t.drop_columns([name for name in mixed if name in t.column_names]) for t in tables]


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _with_json_column(table: pa.Table, name: str, is_text: bool | None) -> pa.Table:
    """Return the table with the column, if it has it, as JSON; of what JSON cannot hold as text, if
    such values are read as text, else as null."""
    if name not in table.column_names:
        return table

    def convert(value: Any) -> str | None:
        return str(value) if is_text and not isinstance(value, bytes) else None

    return replace_column(table, name, json_column(python_values(table.column(name)), convert))


def replace_column(table: pa.Table, name: str, values: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the table with these values in the column, which it gets if it has none of the
    name."""
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)


def find_column(rows: pa.Table, name: str, setting: str) -> pa.ChunkedArray:
    """Return the column, and warn if it holds chats as JSON text; a missing one is a `DataError`
    that names the setting and the nearest column."""
    rows = add_nested_columns(rows, [name])
    if name not in rows.column_names:
        raise DataError(
            f"`{setting}` is `{name}`, but the data has no such column; it has "
            f"{', '.join(rows.column_names)}." + suggest_name(name, rows.column_names)
        )
    column = rows.column(name)
    read_as_it_is = not setting.endswith(".messages_column")
    if read_as_it_is and len(column) and is_chat_in_text(python_values(column[:1])[0]):
        _log.warning(
            "The data's column `%s` (`%s`) holds chats as JSON in texts, and texts are taken as "
            "they are. Write them as lists of messages, so that the chat template renders them.",
            name,
            setting,
        )
    return column


def is_chat_in_text(cell: Any) -> bool:
    """Return whether a cell is a list of chat messages as JSON text."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return False
    try:
        messages = json.loads(cell)
    except (ValueError, RecursionError):
        return False
    return bool(messages) and all(
        isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages
    )


def _read_nested_value(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a dotted name, each part of which is a key of the object that the part
    before it names."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part, default) if isinstance(value, Mapping) else default
    return value

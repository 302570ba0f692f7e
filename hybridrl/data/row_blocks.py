"""Rows of large data in blocks, each of which a process reads and tokenizes by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from hybridrl.config.setting import Setting
from hybridrl.data.data_files import (
    find_common_format,
    iterate_tables,
    load_hub_dataset,
    read_found_rows,
)
from hybridrl.data.json_lines import JsonLine, list_json_lines, read_json_lines
from hybridrl.data.refused_rows import RefusedRows

BLOCK_BYTES = 2 << 20
"""Of a block's rows. Tokenizing takes about a hundred times as much memory where a token is a
byte, in each process."""
SMALL_BYTES = 8 << 20
"""Files up to this size are tokenized in one go: processes would take longer to start."""
_PACKED = 4
"""How much larger rows are than compressed files, roughly."""


class RowBlock(NamedTuple):
    """Neighbouring rows: lines of JSON, or a table as the bytes of an Arrow stream.

    Attributes:
        before: Number of rows before them.
    """

    before: int
    rows: list[JsonLine] | bytes

    def read(
        self, required: Mapping[str, str], texts: Collection[str], refused: RefusedRows
    ) -> pa.Table:
        """Return the rows as a table; the arguments are those of `read_rows`."""
        if isinstance(self.rows, bytes):
            return pa.ipc.open_stream(self.rows).read_all()
        return read_json_lines(self.rows, required, texts, refused)


class RowSource:
    """The rows of files, or of a data set of the hub.

    Args:
        files: Their names; empty for the hub.
        path, split, setting: Of the data set of the hub; the setting also names the files in
            messages.

    Attributes:
        files: Those that the rows come from, a data set's in the hub's cache.
        slice: Which of their rows.
    """

    def __init__(self, files: list[Path], path: str, split: str | None, setting: Setting) -> None:
        self._path, self._setting, self._dataset = path, setting, None
        self._format = find_common_format(files)
        self.files, self.slice = files, list[str]()
        if not files:
            self._dataset = load_hub_dataset(path, split, setting)
            self.files = [Path(one["filename"]) for one in self._dataset.cache_files]
            self.slice = [str(split)]

    @property
    def is_large(self) -> bool:
        """Whether the rows are better tokenized in blocks."""
        sizes = (
            file.stat().st_size * (_PACKED if file.suffix in (".gz", ".parquet") else 1)
            for file in self.files
        )
        known = self._dataset is not None or self._format is not None
        return known and sum(sizes) > SMALL_BYTES

    def read(
        self, required: Mapping[str, str], texts: Collection[str], refused: RefusedRows
    ) -> pa.Table:
        """Read all rows into one table; the arguments are those of `read_rows`."""
        found = self.files if self._dataset is None else self._dataset
        return read_found_rows(found, self._path, required, texts, refused)

    def blocks(self, required: Mapping[str, str]) -> Iterator[RowBlock]:
        """Yield the rows in blocks of about `BLOCK_BYTES`."""
        if self._format == "jsonl":
            return _block_lines(list_json_lines(self.files, self._setting))
        if self._dataset is None:
            return _block_tables(iterate_tables(self.files, required, self._setting))
        return _block_tables(self._dataset.with_format("arrow").iter(1024))


def _block_lines(lines: Iterable[JsonLine]) -> Iterator[RowBlock]:
    before, size, block = 0, 0, list[JsonLine]()
    for line in lines:
        block.append(line)
        size += len(line[2])
        if size >= BLOCK_BYTES:
            yield RowBlock(before, block)
            before, size, block = before + len(block), 0, []
    if block:
        yield RowBlock(before, block)


def _block_tables(tables: Iterable[Any]) -> Iterator[RowBlock]:
    before = 0
    for table in tables:
        rows = max(1, BLOCK_BYTES * table.num_rows // max(1, table.nbytes))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            with pa.BufferOutputStream() as sink:
                with pa.ipc.new_stream(sink, part.schema) as writer:
                    writer.write_table(part)
                yield RowBlock(before, sink.getvalue().to_pybytes())
            before += part.num_rows

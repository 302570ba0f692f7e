"""Rows of large data in blocks, each of which a process reads and tokenizes by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.config.setting import Setting
from hybridrl.data.data_files import find_common_format, iterate_tables
from hybridrl.data.json_lines import JsonLine, list_json_lines, read_json_lines
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.errors import HybridRLError

BLOCK_BYTES = 2 << 20
"""Of a block's rows. Tokenizing takes about a hundred times as much memory where a token is a
byte, in each process."""
SMALL_BYTES = 8 << 20
"""Up to this size rows are tokenized in one go: processes would take longer to start."""
_PACKED = 4
"""How much larger rows are than compressed files, roughly."""


class WholeTableError(HybridRLError):
    """The rows have to be read in one table: there are none, or their tests are tried together."""


class RowBlock(NamedTuple):
    """Neighbouring rows: lines of JSON, or a table.

    Attributes:
        before: Number of rows before them.
        size: Their bytes.
    """

    before: int
    size: int
    rows: list[JsonLine] | Batch

    def read(
        self, required: Mapping[str, str], named: Mapping[str, bool], refused: RefusedRows
    ) -> pa.Table:
        """Return the rows as a table; the arguments are those of `read_found_rows`."""
        if isinstance(self.rows, Batch):
            return self.rows.table
        return read_json_lines(self.rows, required, named, refused)


def estimate_large_size(found: Any) -> int:
    """Return about how many bytes the rows of these files, or of this `datasets.Dataset`, take; 0
    if they are better read in one go, and if their format is for the reader to refuse."""
    if isinstance(found, list):
        packed = (_PACKED if file.suffix in (".gz", ".parquet") else 1 for file in found)
        size = sum(file.stat().st_size * by for file, by in zip(found, packed, strict=True))
        is_known = find_common_format(found) is not None
    else:
        size, is_known = int(found.data.nbytes), True
    return size if is_known and size > SMALL_BYTES else 0


def iterate_blocks(found: Any, required: Mapping[str, str], setting: Setting) -> Iterator[RowBlock]:
    """Yield the rows in blocks of about `BLOCK_BYTES`.

    Args:
        found: Files of one format, or a `datasets.Dataset`.
        required, setting: As of `iterate_tables`.
    """
    parts: Iterator[tuple[int, Any]]
    if not isinstance(found, list):
        parts = _slice_tables(found.with_format("arrow").iter(1024))
    elif find_common_format(found) == "jsonl":
        parts = _group_lines(list_json_lines(found, setting))
    else:
        parts = _slice_tables(iterate_tables(found, required, setting))
    before = 0
    for size, rows in parts:
        yield RowBlock(before, size, rows)
        before += len(rows)


def _group_lines(lines: Iterable[JsonLine]) -> Iterator[tuple[int, list[JsonLine]]]:
    size, block = 0, list[JsonLine]()
    for line in lines:
        size += len(line[2])
        block.append(line)
        if size >= BLOCK_BYTES:
            yield size, block
            size, block = 0, []
    if block:
        yield size, block


def _slice_tables(tables: Iterable[pa.Table]) -> Iterator[tuple[int, Batch]]:
    for table in tables:
        rows = max(1, BLOCK_BYTES * table.num_rows // max(1, table.nbytes))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            yield part.nbytes, Batch(part)

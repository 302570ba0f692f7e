"""StoredRows: rows mapped from a file in which those that are read together lie together.

The system would read several MiB around each page of a mapped file that is touched, which is right
for whoever reads it all. Here it reads what is asked for, each run of neighbouring rows at once.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from hybridrl.batch.batch import Batch, RowNumbers, resolve_row_numbers

_RECORD_ROWS = 1 << 16
"""Rows that are in memory while the file is written."""


def store_rows(rows: Batch, order: np.ndarray, file: BinaryIO) -> StoredRows:
    """Write rows to an empty file in this order and return them mapped from it. The file may lose
    its name then."""
    with pa.ipc.new_file(pa.PythonFile(file, "w"), rows.table.schema) as writer:
        for part in np.array_split(order, -(-len(order) // _RECORD_ROWS)):
            writer.write_table(Batch(rows.table.take(pa.array(part))).table.combine_chunks())
    file.flush()
    return StoredRows(file)


class StoredRows(Batch):
    """The rows of `store_rows`, in the order of the file.

    Args:
        file: As it was written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        buffer = pa.py_buffer(self._map)
        self._begin = buffer.address
        super().__init__(pa.ipc.open_file(buffer).read_all())

    def take(self, rows: RowNumbers) -> Batch:
        """Return the rows with these numbers, of which neighbours are read from the disk at
        once."""
        numbers = resolve_row_numbers(rows, len(self))
        starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
        for run in np.split(numbers, starts[1:]) if len(numbers) else ():
            self._fetch(int(run[0]), int(run[-1]) + 1)
        return super().take(numbers)

    def _fetch(self, start: int, stop: int) -> None:
        """Have the system read rows `start` to `stop`."""
        for piece in self.table.slice(start, stop - start).to_batches():
            for column in piece.columns:
                for begin, end in _find_bytes(column):
                    page = (begin - self._begin) // mmap.PAGESIZE * mmap.PAGESIZE
                    size = end - self._begin - page
                    if size > 0:
                        self._map.madvise(mmap.MADV_WILLNEED, page, size)


def _find_bytes(column: pa.Array) -> Iterator[tuple[int, int]]:
    """Yield the addresses of the values of a column of numbers, or of lists of numbers."""
    if pa.types.is_large_list(column.type) or pa.types.is_list(column.type):
        yield from _find_bytes(column.flatten())
    elif (data := column.buffers()[-1]) is not None and pa.types.is_primitive(column.type):
        width = column.type.bit_width // 8
        begin = data.address + column.offset * width
        yield begin, begin + len(column) * width

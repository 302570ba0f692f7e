"""The program of a process that reads and tokenizes blocks of rows:
`python -m hybridrl.data.block_program`.

It appends what it makes of a block to a file that all processes of a job share, as an Arrow stream,
and answers with its place there.
"""

from __future__ import annotations

import fcntl
import logging
import pickle
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.data.answer_formats import TESTS_COLUMN, extract_reference_answers
from hybridrl.data.refused_rows import RefusedRows, check_rows, checked_by
from hybridrl.data.row_blocks import RowBlock
from hybridrl.data.row_keys import add_keys
from hybridrl.data.row_origin import RowOrigin
from hybridrl.data.row_reader import RowReader
from hybridrl.errors import DataError, HybridRLError
from hybridrl.processes import child

_ALIGNMENT = 64


class RowRecipe(NamedTuple):
    """The way from rows to token ids.

    Attributes:
        place: What the rows are of, for messages.
        tokenize: Called with a reader, the rows and `columns`, by the names of their settings.
        required: Columns that rows must have, by the setting that names them.
    """

    config: DataConfig
    origin: RowOrigin
    place: str
    tokenize: Callable[..., Batch]
    columns: Mapping[str, str | None]
    required: Mapping[str, str]

    @property
    def texts(self) -> list[str]:
        """Columns in which numbers are read as texts."""
        answers = self.columns.get("answer_column")
        return [] if answers is None else [answers]

    def refused(self, before: int | None = None) -> RefusedRows:
        """Return the record of refused rows of the table, or of the part after so many rows."""
        drop, limit = self.config.bad_rows == "drop", self.config.bad_rows_limit
        return RefusedRows(self.place, drop=drop, limit=limit, origin=self.origin, before=before)

    def make(self, tokenizer: Any, rows: pa.Table, refused: RefusedRows) -> Batch:
        """Tokenize a table of rows."""
        answers = self.columns.get("answer_column")
        rows = extract_reference_answers(rows, self.config.answer_format, answers, refused)
        check_rows(self.config, rows, refused)
        return self.tokenize(RowReader.of(self.config, tokenizer, refused), rows, **self.columns)


class WholeTableError(HybridRLError):
    """The rows have to be read in one table: there are none, or their tests are tried together."""


def _refuse_tests(_: DataConfig, rows: pa.Table, refused: RefusedRows) -> None:
    if TESTS_COLUMN in rows.column_names:
        raise WholeTableError


class BlockProgram(logging.Handler):
    """See `child.ItemServer`. The payload of an item is a `RowBlock`."""

    def start(self, setup: tuple[Any, ...], server: child.ItemServer) -> None:
        paths, recipe, tokenizer, file = setup
        sys.path += [place for place in paths if place not in sys.path]
        self._recipe: RowRecipe = pickle.loads(recipe)
        self._tokenizer, self._file = pickle.loads(tokenizer), Path(file)
        log = logging.getLogger("hybridrl")
        log.handlers, log.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self._logs.append([record.name, record.levelno, record.getMessage()])

    def run_blocking(self, block: RowBlock) -> dict[str, Any]:
        self._logs = list[list[Any]]()
        recipe, refused = self._recipe, self._recipe.refused(block.before)
        rows = block.read(recipe.required, recipe.texts, refused)
        with checked_by(_refuse_tests):
            made = add_keys(recipe.make(self._tokenizer, rows, refused), self._tokenizer)
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, made.table.schema) as writer:
                writer.write_table(made.table.combine_chunks())
            data = sink.getvalue()
        with self._file.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(bytes(-file.seek(0, 2) % _ALIGNMENT))
            place = file.tell()
            file.write(data)
        found = {"place": [place, data.size, zlib.crc32(data)], "logs": self._logs}
        return {**found, "refused": refused.export()}

    def explain(self, error: BaseException) -> tuple[str, Any]:
        if isinstance(error, OSError) and error.errno is not None:
            return "OSError", error.errno
        kind = DataError if isinstance(error, DataError) else type(error)
        if isinstance(error, HybridRLError):
            return kind.__name__, str(error)
        return "", child.traceback_of(error, (__file__, child.__file__))


if __name__ == "__main__":
    messages = child.Messages(partial(pickle.dumps, protocol=5), pickle.loads)
    child.ItemServer(BlockProgram(), messages).serve()

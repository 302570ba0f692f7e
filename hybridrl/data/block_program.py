"""The program of a process that reads and tokenizes blocks of rows:
`python -m hybridrl.data.block_program`."""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.data.answer_formats import TESTS_COLUMN, extract_reference_answers
from hybridrl.data.refused_rows import RefusedRows, check_rows
from hybridrl.data.row_blocks import RowBlock, WholeTableError
from hybridrl.data.row_keys import add_keys
from hybridrl.data.row_origin import RowOrigin
from hybridrl.data.row_reader import RowReader
from hybridrl.errors import HybridRLError
from hybridrl.processes import child


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
    def named(self) -> dict[str, bool]:
        """Return the columns that settings name, and whether they are read as text."""
        columns = {"tools_column": self.config.tools_column, **self.columns}
        return {c: name == "answer_column" for name, c in columns.items() if c is not None}

    def refused(self, before: int | None = None) -> RefusedRows:
        """Return the record of refused rows of the table, or of the part after so many rows."""
        drop, limit = self.config.bad_rows == "drop", self.config.bad_rows_limit
        return RefusedRows(self.place, drop, limit, self.origin, before, waits=True)

    def make(self, read: Callable[..., pa.Table], tokenizer: Any, refused: RefusedRows) -> Batch:
        """Tokenize the rows that `read` returns; its arguments are the last three of
        `read_found_rows`."""
        answers = self.columns.get("answer_column")
        rows = read(self.required, self.named, refused)
        rows = extract_reference_answers(rows, self.config.answer_format, answers, refused)
        check_rows(self.config, rows, refused)
        return self.tokenize(RowReader(tokenizer, self.config, refused), rows, **self.columns)


class BlockProgram(logging.Handler):
    """See `child.ItemServer`. The payload of an item is a `RowBlock`; its answer are the bytes of
    an Arrow stream, and what is to be noted of them."""

    def start(self, setup: bytes, server: child.ItemServer) -> None:
        self._recipe: RowRecipe
        self._recipe, self._tokenizer = pickle.loads(setup)
        log = logging.getLogger("hybridrl")
        log.handlers, log.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self._logs.append([record.name, record.levelno, record.getMessage()])

    def run_blocking(self, block: RowBlock) -> tuple[bytes, dict[str, Any]]:
        self._logs = list[list[Any]]()
        refused = self._recipe.refused(block.before)
        made = self._recipe.make(block.read, self._tokenizer, refused)
        if TESTS_COLUMN in made:
            raise WholeTableError
        table = add_keys(made, self._tokenizer).table
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table.combine_chunks())
            data = sink.getvalue().to_pybytes()
        noted = {"crc32": zlib.crc32(data), "logs": self._logs, "refused": refused.export()}
        return data, noted

    def explain(self, error: BaseException) -> tuple[str, Any]:
        if isinstance(error, HybridRLError):
            return "refused", error
        return "", child.traceback_of(error, (__file__, child.__file__))


if __name__ == "__main__":
    child.ItemServer(BlockProgram()).serve()

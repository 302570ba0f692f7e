"""RowReader: from the cells of rows to token ids within the limits; for prompts, examples and
pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridrl.batch.arrow_columns import python_values
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.data.chat_renderer import ChatRenderer
from hybridrl.data.encoding import TokenIds, encode_prompts, quote_excerpt
from hybridrl.data.message_cells import check_chat_allowed, check_no_nul
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DataRow, RowOrigin
from hybridrl.data.table_columns import TOOLS, find_column
from hybridrl.errors import ConfigError, DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Found = TypeVar("Found")
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowReader:
    """Read the cells of one table's rows, render its chats and tokenize its texts.

    Attributes:
        config: How they are read.
        refused: Gets the rows that cannot be read, which are left out if it allows that; else they
            are an error.
    """

    tokenizer: PreTrainedTokenizerBase
    config: DataConfig = field(default_factory=DataConfig)
    refused: RefusedRows = field(default_factory=RefusedRows)

    @property
    def origin(self) -> RowOrigin:
        return self.refused.origin

    @property
    def tools_column(self) -> str | None:
        """Column of the functions that the model may call; a task's rows have none."""
        return None if self.config.task else self.config.tools_column

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Return the renderer of this table's chats, which counts what it does not show."""
        config = self.config
        context = TemplateContext.of(config.chat_template_options, config.date)
        return ChatRenderer(self.tokenizer, context, self.tools_column, config.learn, self.origin)

    def cells(self, rows: pa.Table, column: str, setting: str) -> list[Any]:
        """Return the cells of a column, which a setting of the data names.

        Raises:
            DataError: if there is no such column; of parts of a table, in none of them.
        """
        try:
            return python_values(find_column(rows, column, self.origin / setting))
        except DataError as error:
            self.refused.doubt(error)
            return [None] * rows.num_rows

    def values(
        self,
        rows: pa.Table,
        column: str,
        setting: str,
        parse: Callable[[Any], Found | None],
        expected: str,
        reason: str,
    ) -> list[Found | None]:
        """Return what `parse` makes of the cells of a column; None in the place of those that it
        makes None of, whose rows are refused.

        Args:
            expected: What it wanted, for messages.
            reason: See `RowError`.

        Raises:
            DataError: as `cells`.
        """

        def read(row: DataRow, cell: Any) -> Found:
            if (found := parse(cell)) is None:
                raise RowError(
                    f"{row} has {cell!r} in the column `{column}` (`{row / setting}`), expected "
                    f"{expected}.",
                    reason,
                )
            return found

        return self.refused.map(read, self.cells(rows, column, setting))

    def read(
        self, rows: pa.Table, read: Callable[..., Found], *columns: Sequence[Any]
    ) -> list[Found | None]:
        """Call `read(row, tools, *cells)` for each row; None in the place of those that it refuses.

        Raises:
            DataError: if none may be left out, or too many are.
        """
        tools, name = [None] * rows.num_rows, self.tools_column
        if name is not None and (name != TOOLS or name in rows.column_names):
            tools = self.cells(rows, name, "tools_column")
        found = self.refused.map(read, tools, *columns)
        self.refused.kept(len(found))
        self.renderer.tell(self.refused)
        return found

    def is_chat(self, row: DataRow, tools: Any, *cells: tuple[str | None, str, Any]) -> bool:
        """Tell whether the cells of a row are a chat, which is rendered, or texts, which are taken
        as they are.

        Args:
            cells: The column of each, the setting that names it, and what it holds.

        Raises:
            DataError, ConfigError: for a chat that settings or tokenizer rule out, and for NUL
                characters in a text.
        """
        chats = {
            name: cell for name, _, cell in cells if isinstance(cell, list) or self.config.chat
        }
        for name, cell in chats.items():
            if name is not None:
                check_chat_allowed(row, cell, self.tokenizer, name, self.config.chat)
        if chats:
            return True
        for name, setting, cell in cells:
            check_no_nul(row, cell, str(name), row / setting)
        self.renderer.note_unshown(tools)
        return False

    def check_system_prompt(self, is_chat: Sequence[bool]) -> None:
        """Refuse a system prompt for rows that are not chats, where no message could hold it."""
        if self.config.system_prompt is not None and not all(is_chat):
            raise ConfigError(
                f"`{self.origin / 'system_prompt'}` is set, but the prompts are plain strings, "
                f"which are taken as they are. Set `{self.origin / 'chat'}=true` to wrap each as a "
                "user message, or unset the system prompt."
            )

    def encode_prompts(
        self, texts: Sequence[str], is_chat: Sequence[bool], numbers: Sequence[int] | None = None
    ) -> list[TokenIds]:
        """Return the token ids of each prompt; see `hybridrl.data.encoding.encode_prompts`."""
        return encode_prompts(texts, is_chat, self.tokenizer, self.refused, numbers)

    def rows_within(
        self,
        what: Literal["prompt", "response"],
        encoded: Sequence[TokenIds],
        texts: Sequence[str],
        among: Rows,
        numbers: Sequence[int] | None = None,
    ) -> Rows:
        """Return the numbers (from 0) of the rows within the limit, in order; of those of `among`.

        Args:
            texts: Of the rows, for messages.
            numbers: Of the rows, for messages; None: they count from 1.

        Raises:
            DataError: if a row is too long and `too_long` is `error`, or no row is left.
            ConfigError: if `too_long` is neither.
        """
        limit: int | None = getattr(self.config, f"max_{what}_tokens")
        setting, drop = self.origin / f"max_{what}_tokens", self.origin / "too_long"
        if self.config.too_long not in ("error", "drop"):
            raise ConfigError(f"`{drop}` is `{self.config.too_long}`, expected `error` or `drop`.")
        lengths = np.array([len(ids) for ids in encoded])
        if limit is None:
            return among
        mine = lengths[among]
        kept = among[mine <= limit]
        dropped = len(mine) - len(kept)
        if dropped and self.config.too_long == "error":
            first = int(among[mine > limit][0])
            number = first + 1 if numbers is None else numbers[first]
            raise DataError(
                f"{self.refused.row(number)} has a {what} of {lengths[first]} tokens, more than "
                f"`{setting}` ({limit}); {dropped} of {len(mine)} rows are too long, the "
                f"longest has {mine.max()}. Raise `{setting}`, or set `{drop}=drop`. The {what} "
                f"begins: {quote_excerpt(texts[first])}"
            )
        if not len(kept):
            shortest = min(mine.tolist(), default=sys.maxsize)
            error = DataError(
                f"`{drop}=drop` dropped all rows: the shortest {what} has {shortest} tokens and "
                f"`{setting}` is {limit}. Raise it."
            )
            self.refused.doubt(error, shortest)
        said = "Dropped %d of %d %ss that have more than %d tokens (`%s`)."
        self.refused.warn(said, (dropped, len(mine)), what, limit, setting)
        return kept


def join_rows(found: Sequence[Sequence[Found] | None], refused: Found) -> tuple[list[Found], Rows]:
    """Return what rows have become, each one thing or several, and the number of the row, from 0,
    that each is of; in the place of a refused row there is `refused`."""
    of_rows = [[refused] if one is None else one for one in found]
    numbers = np.repeat(np.arange(len(found)), [len(one) for one in of_rows])
    return [one for row in of_rows for one in row], numbers


def only_rows(batch: Batch, kept: Rows) -> Batch:
    """Return these rows, or the batch itself where they are all."""
    return batch if len(kept) == len(batch) else batch.take(kept)


def check_some(rows: Sequence[Any]) -> None:
    """Refuse to tokenize nothing."""
    if not rows:
        raise DataError("There is nothing to tokenize: the data set has no rows.")

"""Tokenizing the prompts of a training step with their reference answers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from hybridrl.batch.batch import Batch, is_user_column
from hybridrl.conversations.messages import Message
from hybridrl.data.encoding import shorten_value
from hybridrl.data.message_cells import (
    add_system_message,
    check_cell_type,
    check_no_nul,
    read_prompt_messages,
)
from hybridrl.data.row_origin import DataRow
from hybridrl.data.row_reader import RowReader, check_some, only_rows
from hybridrl.errors import RowError

PROMPT_MESSAGES_COLUMN = "prompt_messages"
"""The prompts that were chats as they were, for reward functions that take messages."""
_MAX_EXACT_INTEGER = 2**53
"""Whole numbers below it are exact as floats."""

_log = logging.getLogger(__name__)


def tokenize_prompts(
    reader: RowReader,
    rows: pa.Table,
    prompt_column: str,
    answer_column: str | None,
    rendered: Sequence[bool] | None = None,
) -> Batch:
    """Tokenize the prompts of `rows`, each a string or a list of chat messages.

    Control tokens, such as the one that ends a turn, are read as such where they stand in a string
    that is taken as it is, for it may be a chat that somebody has rendered; the log tells if only
    some have any. In a message they are refused.

    Args:
        rendered: Which prompts are texts that the chat template has made; None: no text is known
            to be one.

    Returns:
        A batch with the columns `prompt_ids` (token-level), `prompt` (the text as the model sees
        it), `prompt_messages` (where prompts are chats), `answer` (text; empty without
        `answer_column`), and every further column of `rows` unchanged, for reward functions to
        read, but for those with the names of columns that the library makes itself. A log message
        names these, and counts rows dropped as too long.

    Raises:
        DataError: if a column is missing, a prompt is malformed, empty or too long, or an answer
            says nothing; names the row, counting from 1.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    answers: Sequence[str | None] = [""] * rows.num_rows
    if answer_column is not None:
        cells = reader.cells(rows, answer_column, "answer_column")
        answers = reader.refused.map(partial(_read_reference_answer, answer_column), cells)
    prompts = reader.cells(rows, prompt_column, "prompt_column")
    check_some(prompts)

    def read(row: DataRow, tools: Any, prompt: Any) -> tuple[str, list[dict[str, str]] | None]:
        check_cell_type(row, prompt, prompt_column, row / "prompt_column")
        if not reader.is_chat(row, tools, (prompt_column, "prompt_column", prompt)):
            return prompt, None
        question = read_prompt_messages(row, prompt, prompt_column)
        messages = add_system_message(reader.config.system_prompt, question)
        text = reader.renderer.prompt(row, messages, tools)
        return text, _role_and_text(question) if isinstance(prompt, list) else None

    found = reader.read(rows, read, prompts)
    texts, chats = zip(*(one or ("", None) for one in found), strict=True)
    is_chat = [isinstance(prompt, list) or reader.config.chat is True for prompt in prompts]
    reader.check_system_prompt([a for a, read in zip(is_chat, found, strict=True) if read])
    has_ends = [a or b for a, b in zip(is_chat, rendered or [False] * len(prompts), strict=True)]
    prompt_ids = reader.encode_prompts(texts, has_ends)
    kept = reader.rows_within("prompt", prompt_ids, texts, reader.refused.kept(len(prompts)))
    columns = {
        "prompt_ids": prompt_ids,
        "prompt": pa.array(texts, pa.large_string()),
        "answer": pa.array(answers, pa.large_string()),
    }
    if any(chats):
        columns[PROMPT_MESSAGES_COLUMN] = list(chats)
    inner = {name for name in (prompt_column, answer_column) if name and "." in name}
    names = [name for name in rows.column_names if name not in columns and name not in inner]
    further = {name: rows.column(name) for name in names}
    if hidden := sorted(name for name in further if not is_user_column(name)):
        _log.warning(
            "The data's %s left out: the library makes columns of such names itself. Rename them "
            "if reward functions need them.",
            f"column `{hidden[0]}` is" if len(hidden) == 1 else f"columns {', '.join(hidden)} are",
        )
    batch = Batch.from_columns(columns | {n: c for n, c in further.items() if is_user_column(n)})
    return only_rows(batch, kept)


def _role_and_text(messages: list[Message]) -> list[dict[str, str]]:
    """Return role and text of each message, the fields that every library writes."""
    return [{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in messages]


def _read_reference_answer(column: str, row: DataRow, cell: Any) -> str:
    """Return the reference answer as text; an empty one is refused, because an empty response would
    match it."""
    if isinstance(cell, list | dict | bool):
        text = json.dumps(cell, default=str)
    elif isinstance(cell, float) and cell.is_integer() and abs(cell) < _MAX_EXACT_INTEGER:
        text = str(int(cell))  # what was a whole number among fractions, or among nothing
    else:
        text = "" if cell is None else str(cell)
    is_number = not isinstance(cell, float) or math.isfinite(cell)
    if not text.strip() or not is_number or isinstance(cell, bytes):
        raise RowError(
            f"{row} has {shorten_value(cell)} in the column `{column}` "
            f"(`{row / 'answer_column'}`), expected the right answer. Leave the row out; or set "
            f"{row / 'answer_column'}=null if no reward function reads answers.",
            "without an answer",
        )
    check_no_nul(row, text, column, row / "answer_column")
    return text

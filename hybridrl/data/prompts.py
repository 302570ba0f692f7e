"""Turning rows of prompts and answers into the prompts of a training step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from hybridrl.batch.arrow_columns import python_values
from hybridrl.batch.batch import Batch, is_of_data
from hybridrl.conversations.messages import Message
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.data.chat import (
    check_cell,
    check_chat,
    check_system_prompt,
    check_text,
    open_with,
    question_of,
)
from hybridrl.data.chat_renderer import ChatRenderer
from hybridrl.data.encoding import TokenIds, encode_prompts, shortened
from hybridrl.data.lengths import TooLong, rows_within
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DataRow
from hybridrl.data.table_columns import TOOLS, column_of, tools_cells
from hybridrl.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = "prompt_messages"
"""The prompts that were chats as they were, for reward functions that take messages."""
MOST_EXACT = 2**53
"""Whole numbers below it are exact as floats."""

_log = logging.getLogger(__name__)


class RenderedPrompts(NamedTuple):
    """The prompts as the model sees them: their text, and their token ids, one array per row; and
    those that came as chats, as lists of messages without the system prompt."""

    texts: list[str]
    token_ids: list[TokenIds]
    chats: list[list[dict[str, str]] | None]


def tokenize_prompts(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str,
    answer_column: str | None,
    chat: bool | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int,
    too_long: TooLong = "error",
    refused: RefusedRows | None = None,
    context: TemplateContext | None = None,
    tools_column: str | None = TOOLS,
    rendered: Sequence[bool] | None = None,
) -> Batch:
    """Tokenizes the prompts of `rows`.

    A prompt is a string or a list of chat messages (`role`, `content`). `chat` says how it reaches
    the model: None renders lists of messages with the tokenizer's chat template and takes strings
    as they are; True also wraps a string as one user message; False allows strings only.
    `system_prompt` opens every chat that does not bring a system message of its own.

    Control tokens, such as the one that ends a turn, are read as such where they stand in a string
    that is taken as it is, for it may be a chat that somebody has rendered; the log tells if only
    some have any. In a message they are refused.

    Args:
        refused: Gets the rows that cannot be read, which are left out if it allows that; None:
            they are an error.
        context: Options of the chat template, and the date of the run.
        tools_column: Of the functions that the model may call, which the template shows; `tools`
            may be missing. None: there are none.
        rendered: Which prompts are texts that the chat template has made; None: no text is known
            to be one.

    Returns:
        A batch with the columns `prompt_ids` (token-level), `prompt` (the text as the model sees
        it), `prompt_messages` (where prompts are chats), `answer` (text; empty without
        `answer_column`), and every further column of `rows`
        unchanged, for reward functions to read, but for those with the names of columns that the
        library makes itself. A log message names these, and counts rows dropped as too long.

    Raises:
        DataError: if a column is missing, a prompt is malformed, empty or too long, or an answer
            says nothing; names the row, counting from 1.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    refused = RefusedRows() if refused is None else refused
    answers = _answers(rows, answer_column, refused)
    prompts = render_prompts(
        rows,
        tokenizer,
        prompt_column=prompt_column,
        chat=chat,
        system_prompt=system_prompt,
        refused=refused,
        renderer=ChatRenderer(tokenizer, context, tools_column, origin=refused.origin),
        tools=tools_cells(rows, tools_column, refused.origin),
        rendered=rendered or [False] * rows.num_rows,
    )
    among = refused.kept(rows.num_rows)
    ids, texts = prompts.token_ids, prompts.texts
    kept = rows_within(
        "prompt", ids, max_prompt_tokens, texts, too_long, among, origin=refused.origin
    )
    columns = {
        "prompt_ids": prompts.token_ids,
        "prompt": pa.array(prompts.texts, pa.large_string()),
        "answer": pa.array(answers, pa.large_string()),
    }
    if any(prompts.chats):
        columns[MESSAGES] = prompts.chats
    inner = {name for name in (prompt_column, answer_column) if name and "." in name}
    names = [name for name in rows.column_names if name not in columns and name not in inner]
    further = {name: rows.column(name) for name in names}
    if hidden := sorted(name for name in further if not is_of_data(name)):
        _log.warning(
            "The data's %s left out: the library makes columns of such names itself. Rename them "
            "if reward functions need them.",
            f"column `{hidden[0]}` is" if len(hidden) == 1 else f"columns {', '.join(hidden)} are",
        )
    batch = Batch.from_columns(columns | {n: c for n, c in further.items() if is_of_data(n)})
    return batch if len(kept) == len(batch) else batch.take(kept)


def render_prompts(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str,
    chat: bool | None,
    system_prompt: str | None,
    refused: RefusedRows,
    renderer: ChatRenderer,
    tools: list[Any],
    rendered: Sequence[bool],
) -> RenderedPrompts:
    """Renders and tokenizes the column `prompt_column`; see `tokenize_prompts` for the rules.
    Refused rows have empty texts."""
    prompts = python_values(column_of(rows, prompt_column, refused.origin / "prompt_column"))
    if not prompts:
        raise DataError("There is nothing to tokenize: the data set has no rows.")

    def read(row: DataRow, prompt: Any, cell: Any) -> tuple[str, list[dict[str, str]] | None]:
        check_cell(row, prompt, prompt_column, row / "prompt_column")
        if not isinstance(prompt, list) and chat is not True:
            check_text(row, prompt, prompt_column, row / "prompt_column")
            renderer.note_unshown(cell)
            return prompt, None
        check_chat(row, prompt, tokenizer, prompt_column, chat)
        question = question_of(row, prompt, prompt_column)
        messages = open_with(system_prompt, question)
        text = renderer.prompt(row, messages, renderer.tools(row, cell))
        return text, _plain(question) if isinstance(prompt, list) else None

    read_ones = refused.map(read, prompts, tools)
    found = [one or ("", None) for one in read_ones]
    refused.kept(len(prompts))
    renderer.tell()
    texts, chats = [text for text, _ in found], [messages for _, messages in found]
    is_chat = [isinstance(prompt, list) or chat is True for prompt in prompts]
    check_system_prompt(
        system_prompt,
        [a for a, read in zip(is_chat, read_ones, strict=True) if read],
        refused.origin,
    )
    has_ends = [a or b for a, b in zip(is_chat, rendered, strict=True)]
    return RenderedPrompts(texts, encode_prompts(texts, has_ends, tokenizer, refused), chats)


def _plain(messages: list[Message]) -> list[dict[str, str]]:
    """Role and text of each message, as every library writes them."""
    return [{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in messages]


def _answers(rows: pa.Table, answer_column: str | None, refused: RefusedRows) -> list[str | None]:
    if answer_column is None:
        return [""] * rows.num_rows
    cells = python_values(column_of(rows, answer_column, refused.origin / "answer_column"))
    return refused.map(partial(_answer, answer_column), cells)


def _answer(column: str, row: DataRow, cell: Any) -> str:
    """The answer as text. One that says nothing is refused: an empty response would be right."""
    if isinstance(cell, list | dict | bool):
        text = json.dumps(cell, default=str)
    elif isinstance(cell, float) and cell.is_integer() and abs(cell) < MOST_EXACT:
        text = str(int(cell))  # what was a whole number among fractions, or among nothing
    else:
        text = "" if cell is None else str(cell)
    is_number = not isinstance(cell, float) or math.isfinite(cell)
    if not text.strip() or not is_number or isinstance(cell, bytes):
        raise RowError(
            f"{row} has {shortened(cell)} in the column `{column}` (`{row / 'answer_column'}`), "
            f"expected the right answer. Leave the row out; or set {row / 'answer_column'}=null if "
            "no reward function reads answers.",
            "without an answer",
        )
    check_text(row, text, column, row / "answer_column")
    return text

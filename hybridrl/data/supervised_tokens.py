"""Tokenizing prompts with responses, or whole conversations, for supervised training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.conversations.messages import Message
from hybridrl.data.encoding import append_end_token, encode_turns, find_end_token, trimmed
from hybridrl.data.message_cells import (
    add_system_message,
    check_cell_type,
    check_chat_allowed,
    parse_prompt_messages,
    read_prompt_messages,
)
from hybridrl.data.row_origin import DataRow
from hybridrl.data.row_reader import RowReader, check_some, join_rows, only_rows
from hybridrl.data.table_columns import is_chat_in_text
from hybridrl.errors import DataError, RowError

CONVERSATION = "conversation_number"
"""Where a conversation has become several rows: a number that they share."""


class RenderedConversation(NamedTuple):
    """A rendered conversation: its texts in turn (prompt, response, the text before the next
    response, ...) and whether it is a chat."""

    texts: list[str]
    is_chat: bool


def tokenize_examples(
    reader: RowReader,
    rows: pa.Table,
    prompt_column: str,
    response_column: str,
    further: Mapping[str, np.ndarray] | None = None,
) -> Batch:
    """Tokenize each prompt, and each response followed by the end-of-sequence token.

    The response to a chat is an assistant's message and goes through the template as well; it may
    be a list of messages, of which the assistant's are learned as `RowReader.learn` says. Other
    responses are taken as they are.

    Args:
        further: Columns with a number for each row.

    Returns:
        A batch with the token-level columns `prompt_ids`, `response_ids` (everything after the
        prompt) and `response_mask` (uint8; 1 for the tokens to learn, the end included). Rows
        dropped as too long are counted in a log message. Where conversations have become several
        rows, `conversation_number` says which belong together.

    Raises:
        DataError: if a column is missing, a prompt or response is not usable, or the tokenizer has
            no end-of-sequence token; names the row.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    prompts = reader.cells(rows, prompt_column, "prompt_column")
    responses = reader.cells(rows, response_column, "response_column")

    def read(row: DataRow, tools: Any, prompt: Any, response: Any) -> list[RenderedConversation]:
        check_cell_type(row, response, response_column, row / "response_column", may_be_empty=True)
        check_cell_type(row, prompt, prompt_column, row / "prompt_column")
        cells = (
            (prompt_column, "prompt_column", prompt),
            (response_column, "response_column", response),
        )
        if not reader.is_chat(row, tools, *cells):
            return [
                RenderedConversation([prompt, trimmed(response, reader.tokenizer)], is_chat=False)
            ]
        asked = add_system_message(
            reader.config.system_prompt, read_prompt_messages(row, prompt, prompt_column)
        )
        messages = asked + parse_prompt_messages(row, response, "assistant")
        return _examples_of(reader, row, messages, len(asked), tools, response_column)

    examples = reader.read(rows, read, prompts, responses)
    reader.check_system_prompt([example.is_chat for one in examples for example in one or ()])
    read_ones = [r for r, e in zip(responses, examples, strict=True) if e is not None]
    if read_ones and not any(map(_has_content, read_ones)):
        reader.refused.doubt(
            DataError(
                f"All responses of the data, in the column `{response_column}` "
                f"(`{reader.origin / 'response_column'}`), are empty, so nothing would be learned "
                "but to end. Name the column that holds them."
            )
        )
    return _build_batch(reader, examples, further)


def tokenize_conversations(reader: RowReader, rows: pa.Table, messages_column: str) -> Batch:
    """Tokenize whole conversations, of which the assistant's turns are learned.

    What precedes the assistant's first turn is the prompt, everything from there to its last turn
    the response; the turns of others in between have a `response_mask` of 0.

    Returns:
        The columns of `tokenize_examples`.

    Raises:
        DataError: if the column is missing, a conversation is malformed, begins with the
            assistant or never comes to it, or the template does not let the turns be told apart
            (see `ChatRenderer.examples`); names the row.
        ConfigError: if the tokenizer has no chat template.
    """

    def read(row: DataRow, tools: Any, cell: Any) -> list[RenderedConversation]:
        cell = json.loads(cell) if is_chat_in_text(cell) else cell
        if not isinstance(cell, list) or not cell:
            raise RowError(
                f"{row} has {cell!r} in the column `{messages_column}` "
                f"(`{row / 'messages_column'}`), expected a list of chat messages.",
                "without messages",
            )
        check_chat_allowed(row, cell, reader.tokenizer, messages_column, None)
        messages = add_system_message(reader.config.system_prompt, parse_prompt_messages(row, cell))
        return _examples_of(reader, row, messages, 0, tools, messages_column)

    cells = reader.cells(rows, messages_column, "messages_column")
    return _build_batch(reader, reader.read(rows, read, cells))


def tokenize_task_turns(reader: RowReader, rows: pa.Table) -> Batch:
    """Tokenize the examples of a built-in task whose answers take several turns.

    The column `turns` holds what the model writes, what a tool says, what the model writes then,
    and so on. Each is tokenized by itself, as in a rollout; the model's are learned.

    Returns:
        The columns of `tokenize_examples`.
    """
    prompts, turns = rows.column("prompt").to_pylist(), rows.column("turns").to_pylist()
    examples = [
        [RenderedConversation([p, *t], is_chat=False)] for p, t in zip(prompts, turns, strict=True)
    ]
    unlimited = DataConfig(max_prompt_tokens=sys.maxsize)
    return _build_batch(RowReader(reader.tokenizer, unlimited), examples)


def _has_content(response: str | list[Any]) -> bool:
    """Return whether a response has more than white space, or a message with content or tool
    calls."""
    if isinstance(response, str):
        return bool(response.strip())
    return any(
        message.get(key) for message in response for key in ("content", "value", "tool_calls")
    )


def _examples_of(
    reader: RowReader,
    row: DataRow,
    messages: list[Message],
    start: int,
    tools: Any,
    column: str,
) -> list[RenderedConversation]:
    """The assistant's messages from number `start` on are learned."""
    places = range(start, len(messages))
    answers = [place for place in places if messages[place]["role"] == "assistant"]
    if not answers:
        raise RowError(
            f"{row} has no message of the role `assistant` in the column `{column}`, so there is "
            "nothing to learn from it. Leave the row out.",
            "without a message of the assistant",
        )
    if answers[0] == 0:
        raise RowError(
            f"{row} begins with the assistant's message in the column `{column}`, expected a "
            "message that it answers. Leave that message out.",
            "that begin with the assistant's message",
        )
    found = reader.renderer.examples(row, messages, answers, tools)
    return [RenderedConversation(texts, is_chat=True) for texts in found]


def _build_batch(
    reader: RowReader,
    found: Sequence[list[RenderedConversation] | None],
    further: Mapping[str, np.ndarray] | None = None,
) -> Batch:
    check_some(found)
    reader.refused.kept(len(found))
    examples, numbers = join_rows(found, RenderedConversation(["", ""], is_chat=False))
    row_numbers: list[int] = (numbers + 1).tolist()
    end = find_end_token(reader.tokenizer)
    prompts = [example.texts[0] for example in examples]
    is_chat = [example.is_chat for example in examples]
    prompt_ids = reader.encode_prompts(prompts, is_chat, row_numbers)
    among = np.flatnonzero(np.isin(numbers, reader.refused.kept(len(found))))
    texts = [text for example in examples for text in example.texts[1:]]
    encoded = iter(encode_turns(texts, reader.tokenizer, reader.refused))
    response_ids, masks = [], []
    for example in examples:
        turns = [next(encoded) for _ in example.texts[1:]]
        if not example.is_chat:  # whose template says where its turns end
            turns[-1] = append_end_token(turns[-1], end)
        is_answer = [place % 2 == 0 for place in range(len(turns))]
        response_ids.append(np.concatenate(turns))
        masks.append(np.repeat(np.array(is_answer, np.uint8), [len(turn) for turn in turns]))
    columns: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response_mask": masks,
    }
    columns |= {name: values[numbers] for name, values in (further or {}).items()}
    if len(examples) > len(found) or reader.refused.is_part:  # another part may need it
        columns[CONVERSATION] = numbers + reader.refused.first
    answers = [example.texts[1] for example in examples]
    kept = np.intersect1d(
        reader.rows_within("prompt", prompt_ids, prompts, among, row_numbers),
        reader.rows_within("response", response_ids, answers, among, row_numbers),
    )
    if not len(kept):
        origin, config = reader.origin, reader.config
        reader.refused.doubt(
            DataError(
                f"`{origin / 'too_long'}=drop` dropped all rows: each has a prompt longer than "
                f"`{origin / 'max_prompt_tokens'}` ({config.max_prompt_tokens}) or a response "
                f"longer than `{origin / 'max_response_tokens'}` ({config.max_response_tokens}). "
                "Raise them."
            )
        )
    return only_rows(Batch.from_columns(columns), kept)

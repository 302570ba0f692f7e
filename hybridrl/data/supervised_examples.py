"""Turning prompts with responses, or whole conversations, into what supervised training reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from hybridrl.batch.arrow_columns import python_values
from hybridrl.batch.batch import Batch
from hybridrl.conversations.messages import Message, Tool
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.data.chat import (
    check_cell,
    check_chat,
    check_system_prompt,
    check_text,
    messages_of,
    open_with,
    question_of,
)
from hybridrl.data.chat_renderer import ChatRenderer
from hybridrl.data.encoding import encode_prompts, encode_turns, end_token, ended, trimmed
from hybridrl.data.lengths import TooLong, rows_within
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DataRow
from hybridrl.data.table_columns import (
    TOOLS,
    column_of,
    is_chat_in_text,
    tools_cells,
)
from hybridrl.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Learn = Literal["all", "last", "each"]
CONVERSATION = "conversation"
"""Where a conversation has become several rows: a number that they share."""


class _Example(NamedTuple):
    """Texts in turn: the prompt, an answer, what comes before the next answer, that answer, ..."""

    texts: list[str]
    is_chat: bool


def tokenize_examples(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str,
    response_column: str,
    *,
    chat: bool | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    too_long: TooLong = "error",
    refused: RefusedRows | None = None,
    context: TemplateContext | None = None,
    tools_column: str | None = TOOLS,
    learn: Learn = "all",
) -> Batch:
    """Tokenizes each prompt, and each response followed by the end-of-sequence token.

    `chat` and `system_prompt` mean what they mean in `tokenize_prompts`. The response to a chat is
    an assistant's message and goes through the template as well; it may be a list of messages, of
    which the assistant's are learned as `learn` says. Other responses are taken as they are. The
    further arguments are what they are in `tokenize_prompts`.

    Args:
        learn: Which answers of a conversation: `all`, in one row where the template shows each as
            it is generated, else in several; `each` in a row of its own; or the `last` alone.

    Returns:
        A batch with the token-level columns `prompt_ids`, `response_ids` (everything after the
        prompt) and `response_mask` (uint8; 1 for the tokens to learn, the end included). Rows
        dropped as too long are counted in a log message. Where conversations have become several
        rows, `conversation` says which belong together.

    Raises:
        DataError: if a column is missing, a prompt or response is not usable, or the tokenizer has
            no end-of-sequence token; names the row.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    refused = RefusedRows() if refused is None else refused
    origin = refused.origin
    prompts = python_values(column_of(rows, prompt_column, origin / "prompt_column"))
    responses = python_values(column_of(rows, response_column, origin / "response_column"))
    renderer = ChatRenderer(tokenizer, context, tools_column, learn, origin)

    def read(row: DataRow, prompt: Any, response: Any, tools_cell: Any) -> list[_Example]:
        check_cell(row, response, response_column, row / "response_column", may_be_empty=True)
        check_cell(row, prompt, prompt_column, row / "prompt_column")
        chats = {prompt_column: prompt, response_column: response}
        chats = {name: cell for name, cell in chats.items() if isinstance(cell, list) or chat}
        for name, cell in chats.items():
            check_chat(row, cell, tokenizer, name, chat)
        if chats:
            asked = open_with(system_prompt, question_of(row, prompt, prompt_column))
            messages = asked + messages_of(row, response, "assistant")
            tools = renderer.tools(row, tools_cell)
            return _examples_of(row, messages, len(asked), renderer, tools, response_column)
        check_text(row, prompt, prompt_column, row / "prompt_column")
        check_text(row, response, response_column, row / "response_column")
        renderer.note_unshown(tools_cell)
        return [_Example([prompt, trimmed(response, tokenizer)], is_chat=False)]

    examples = refused.map(read, prompts, responses, tools_cells(rows, tools_column, origin))
    refused.kept(len(examples))
    renderer.tell()
    is_chat = [example.is_chat for one in examples for example in one or ()]
    check_system_prompt(system_prompt, is_chat, origin)
    read_ones = [r for r, e in zip(responses, examples, strict=True) if e is not None]
    if read_ones and not any(map(_says_something, read_ones)):
        raise DataError(
            f"All responses of the data, in the column `{response_column}` "
            f"(`{origin / 'response_column'}`), are empty, so nothing would be learned but to end. "
            "Name the column that holds them."
        )
    return _tokenize(examples, tokenizer, max_prompt_tokens, max_response_tokens, too_long, refused)


def tokenize_conversations(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    messages_column: str,
    *,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    too_long: TooLong = "error",
    refused: RefusedRows | None = None,
    context: TemplateContext | None = None,
    tools_column: str | None = TOOLS,
    learn: Learn = "all",
) -> Batch:
    """Tokenizes whole conversations, of which the assistant's turns are learned.

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
    refused = RefusedRows() if refused is None else refused
    origin = refused.origin
    renderer = ChatRenderer(tokenizer, context, tools_column, learn, origin)

    def read(row: DataRow, cell: Any, tools_cell: Any) -> list[_Example]:
        cell = json.loads(cell) if is_chat_in_text(cell) else cell
        if not isinstance(cell, list) or not cell:
            raise RowError(
                f"{row} has {cell!r} in the column `{messages_column}` "
                f"(`{row / 'messages_column'}`), expected a list of chat messages.",
                "without messages",
            )
        check_chat(row, cell, tokenizer, messages_column, None)
        messages = open_with(system_prompt, messages_of(row, cell))
        tools = renderer.tools(row, tools_cell)
        return _examples_of(row, messages, 0, renderer, tools, messages_column)

    cells = python_values(column_of(rows, messages_column, origin / "messages_column"))
    examples = refused.map(read, cells, tools_cells(rows, tools_column, origin))
    renderer.tell()
    return _tokenize(examples, tokenizer, max_prompt_tokens, max_response_tokens, too_long, refused)


def tokenize_turns(rows: pa.Table, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Tokenizes the examples of a built-in task whose answers take several turns.

    The column `turns` holds what the model writes, what a tool says, what the model writes then,
    and so on. Each is tokenized by itself, as in a rollout; the model's are learned.

    Returns:
        The columns of `tokenize_examples`.
    """
    prompts, turns = rows.column("prompt").to_pylist(), rows.column("turns").to_pylist()
    examples = [[_Example([p, *t], is_chat=False)] for p, t in zip(prompts, turns, strict=True)]
    return _tokenize(examples, tokenizer, None, None, "error", RefusedRows())


def _says_something(response: str | list[Any]) -> bool:
    """Whether a response is more than blanks, or messages without a word."""
    if isinstance(response, str):
        return bool(response.strip())
    return any(
        message.get(key) for message in response for key in ("content", "value", "tool_calls")
    )


def _examples_of(
    row: DataRow,
    messages: list[Message],
    start: int,
    renderer: ChatRenderer,
    tools: list[Tool],
    column: str,
) -> list[_Example]:
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
    found = renderer.examples(row, messages, answers, tools)
    return [_Example(texts, is_chat=True) for texts in found]


def _tokenize(
    found: Sequence[list[_Example] | None],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None,
    max_response_tokens: int | None,
    too_long: TooLong,
    refused: RefusedRows,
) -> Batch:
    if not found:
        raise DataError("There is nothing to tokenize: the data set has no rows.")
    refused.kept(len(found))
    of_rows = [one or [_Example(["", ""], is_chat=False)] for one in found]
    examples = [example for one in of_rows for example in one]
    numbers = np.repeat(np.arange(len(found)), [len(one) for one in of_rows])
    end = end_token(tokenizer)
    prompts = [example.texts[0] for example in examples]
    is_chat = [example.is_chat for example in examples]
    prompt_ids = encode_prompts(prompts, is_chat, tokenizer, refused, (numbers + 1).tolist())
    among = np.flatnonzero(np.isin(numbers, refused.kept(len(found))))
    encoded = iter(encode_turns([text for e in examples for text in e.texts[1:]], tokenizer))
    response_ids, masks = [], []
    for example in examples:
        turns = [next(encoded) for _ in example.texts[1:]]
        if not example.is_chat:  # whose template says where its turns end
            turns[-1] = ended(turns[-1], end)
        is_answer = [place % 2 == 0 for place in range(len(turns))]
        response_ids.append(np.concatenate(turns))
        masks.append(np.repeat(np.array(is_answer, np.uint8), [len(turn) for turn in turns]))
    columns: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "response_mask": masks,
    }
    if len(examples) > len(found):
        columns[CONVERSATION] = numbers
    origin, rest = refused.origin, (too_long, among, numbers + 1)
    answers = [example.texts[1] for example in examples]
    kept = np.intersect1d(
        rows_within("prompt", prompt_ids, max_prompt_tokens, prompts, *rest, origin=origin),
        rows_within("response", response_ids, max_response_tokens, answers, *rest, origin=origin),
    )
    if not len(kept):
        raise DataError(
            f"`{origin / 'too_long'}=drop` dropped all rows: each has a prompt longer than "
            f"`{origin / 'max_prompt_tokens'}` ({max_prompt_tokens}) or a response longer than "
            f"`{origin / 'max_response_tokens'}` ({max_response_tokens}). Raise them."
        )
    batch = Batch.from_columns(columns)
    return batch if len(kept) == len(batch) else batch.take(kept)

"""Turning pairs of a better and a worse response into what preference training reads."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from hybridrl.batch.arrow_columns import python_values
from hybridrl.batch.batch import Batch, Ragged
from hybridrl.conversations.messages import Message
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
from hybridrl.data.table_columns import TOOLS, column_of, tools_cells
from hybridrl.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")

_log = logging.getLogger(__name__)


class _Pair(NamedTuple):
    """The texts of a pair as the model sees them."""

    prompt: str
    chosen: str
    rejected: str
    is_chat: bool


def tokenize_pairs(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str | None,
    chosen_column: str,
    rejected_column: str,
    *,
    margin_column: str | None = None,
    chat: bool | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    too_long: TooLong = "error",
    refused: RefusedRows | None = None,
    context: TemplateContext | None = None,
    tools_column: str | None = TOOLS,
) -> Batch:
    """Tokenizes pairs of responses to one prompt, the better one and the worse one.

    A response is a string, or a list of chat messages that ends with the assistant's. Such a list
    may hold the prompt too, as data sets of the hub often do; then `prompt_column` may be None or
    absent, and if it is there it must say the same. With None, so may a transcript
    (`messages_of_transcript`). `chat` and `system_prompt` mean what they mean
    in `tokenize_prompts`; the answers to a chat go through the chat template as well.

    Args:
        margin_column: How much better the chosen answer is, a finite number; None: 0 for all.
        refused, context, tools_column: As in `tokenize_prompts`.

    Returns:
        A batch with one row per pair: the token-level columns `prompt_ids`, `chosen_ids` and
        `rejected_ids`, both answers with the end-of-sequence token at their end, and `margin`
        (float32). Pairs of two equal answers, and rows dropped as too long, are counted in a log
        message.

    Raises:
        DataError: if a column is missing, a row is malformed or too long (names the row, counting
            from 1), or no pair is left.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    refused = RefusedRows() if refused is None else refused
    origin = refused.origin
    chosen = python_values(column_of(rows, chosen_column, origin / "chosen_column"))
    rejected = python_values(column_of(rows, rejected_column, origin / "rejected_column"))
    margins = _margins(rows, margin_column, refused)
    if not chosen:
        raise DataError("There is nothing to tokenize: the data set has no rows.")
    columns = _Columns(prompt_column, chosen_column, rejected_column)
    if prompt_column is not None and prompt_column in rows.column_names:
        prompts = python_values(rows.column(prompt_column))
    elif prompt_column is not None and any(isinstance(answer, str) for answer in chosen):
        prompts = column_of(rows, prompt_column, origin / "prompt_column").to_pylist()  # raises
    else:
        prompts = [None] * len(chosen)
        columns = columns._replace(prompt=None)

    renderer = ChatRenderer(tokenizer, context, tools_column, origin=origin)

    def read(row: DataRow, tools: Any, *cells: Any) -> _Pair:
        return _pair_of(row, cells, columns, tokenizer, chat, system_prompt, renderer, tools)

    found = refused.map(read, tools_cells(rows, tools_column, origin), prompts, chosen, rejected)
    renderer.tell()
    kept = refused.kept(len(found))
    check_system_prompt(system_prompt, [pair.is_chat for pair in found if pair is not None], origin)
    pairs = [pair or _Pair("", "", "", is_chat=False) for pair in found]

    end = end_token(tokenizer)
    texts = [pair.prompt for pair in pairs]
    prompt_ids = encode_prompts(texts, [pair.is_chat for pair in pairs], tokenizer, refused)
    answers = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    chosen_ids, rejected_ids = (
        [
            ids if pair.is_chat else ended(ids, end)  # a chat's template says where turns end
            for ids, pair in zip(encode_turns(side, tokenizer), pairs, strict=True)
        ]
        for side in answers
    )
    read_rows = refused.kept(len(pairs))
    kept = read_rows[[pairs[row].chosen != pairs[row].rejected for row in read_rows]]
    if len(kept) < len(read_rows):
        _log.warning(
            "Dropped %d of %d pairs whose chosen and rejected responses are the same.",
            len(read_rows) - len(kept),
            len(read_rows),
        )
    limits = [("prompt", prompt_ids, texts, max_prompt_tokens)]
    limits += [
        ("response", ids, side, max_response_tokens)
        for ids, side in zip((chosen_ids, rejected_ids), answers, strict=True)
    ]
    for what, ids, side, limit in limits:
        kept = np.intersect1d(
            kept, rows_within(what, ids, limit, side, too_long, read_rows, origin=origin)
        )
    if not len(kept):
        raise DataError(
            f"None of the {len(pairs)} pairs is left: in each, the responses in `{chosen_column}` "
            f"(`{origin / 'chosen_column'}`) and `{rejected_column}` "
            f"(`{origin / 'rejected_column'}`) are the same, or `{origin / 'too_long'}=drop` "
            "dropped it."
        )
    batch = Batch.from_columns(
        {
            "prompt_ids": prompt_ids,
            "chosen_ids": chosen_ids,
            "rejected_ids": rejected_ids,
            "margin": margins,
        }
    )
    return batch if len(kept) == len(batch) else batch.take(kept)


def samples_of_pairs(pairs: Batch) -> Batch:
    """Two neighbouring rows for each pair, the chosen answer first.

    Returns:
        `response_ids` (the answer), `response_mask` (uint8, all ones) and, twice each, the pair's
        further columns, among them `prompt_ids` and `margin`.
    """
    sides = ("chosen_ids", "rejected_ids")
    shared = Batch(pairs.table.drop_columns(list(sides)))
    both = [shared.with_columns({"response_ids": pairs.array(side)}) for side in sides]
    in_turn = np.arange(2 * len(pairs)).reshape(2, -1).T.ravel()
    samples = Batch.concat(both).take(in_turn)
    ids, cu_seqlens = samples.ragged("response_ids")
    mask = Ragged(torch.ones(len(ids), dtype=torch.uint8), cu_seqlens)
    return samples.with_columns({"response_mask": mask})


class _Columns(NamedTuple):
    prompt: str | None  # None: the prompts stand in the answers
    chosen: str
    rejected: str


def _pair_of(
    row: DataRow,
    cells: tuple[Any, Any, Any],
    columns: _Columns,
    tokenizer: PreTrainedTokenizerBase,
    chat: bool | None,
    system_prompt: str | None,
    renderer: ChatRenderer,
    tools_cell: Any,
) -> _Pair:
    prompt, chosen, rejected = cells
    if columns.prompt is None:
        chosen, rejected = messages_of_transcript(chosen), messages_of_transcript(rejected)
        cells = (prompt, chosen, rejected)
    check_cell(row, chosen, columns.chosen, row / "chosen_column", may_be_empty=True)
    check_cell(row, rejected, columns.rejected, row / "rejected_column", may_be_empty=True)
    if type(chosen) is not type(rejected):
        raise RowError(
            f"{row} has a string in one of the columns `{columns.chosen}` and `{columns.rejected}` "
            "and a list of chat messages in the other; write both alike.",
            "with unlike responses",
        )
    if columns.prompt is not None:
        check_cell(row, prompt, columns.prompt, row / "prompt_column")
    elif isinstance(chosen, str):
        raise RowError(
            f"{row} has its responses as strings, which do not tell where the prompt ends, and "
            f"`{row / 'prompt_column'}` is null. Set it to the column of the prompts.",
            "without a prompt",
        )
    chats = dict(zip(columns, cells, strict=True))
    chats = {name: cell for name, cell in chats.items() if isinstance(cell, list) or chat}
    for name, cell in chats.items():
        if name is not None:
            check_chat(row, cell, tokenizer, name, chat)
    if not chats:
        for name, cell in zip(columns, cells, strict=True):
            check_text(row, cell, str(name), row / "*_column")
        renderer.note_unshown(tools_cell)
        ends = (trimmed(cell, tokenizer) for cell in (chosen, rejected))
        return _Pair(prompt, *ends, is_chat=False)
    better, worse = (messages_of(row, cell, "assistant") for cell in (chosen, rejected))
    asked = open_with(system_prompt, _prompt_of(row, prompt, better, worse, columns))
    tools = renderer.tools(row, tools_cell)
    (first,), (second,) = (
        renderer.examples(row, [*asked, answer], [len(asked)], tools)
        for answer in (better[-1], worse[-1])
    )
    return _Pair(first[0], first[1], second[1], is_chat=True)


def messages_of_transcript(cell: Any) -> Any:
    """The messages of a text in which each begins with `Human: ` or `Assistant: ` after an empty
    line, as in Anthropic's HH-RLHF; anything else as it is."""
    if not isinstance(cell, str):
        return cell
    before, *said = _SPEAKER.split(cell)
    if before.strip() or not said:
        return cell
    speakers = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": speakers[who], "content": text.strip()}
        for who, text in zip(said[::2], said[1::2], strict=True)
    ]


def _prompt_of(
    row: DataRow,
    prompt: Any,
    better: list[Message],
    worse: list[Message],
    columns: _Columns,
) -> list[Message]:
    """The messages that both answers follow."""
    for name, messages in ((columns.chosen, better), (columns.rejected, worse)):
        if messages[-1]["role"] != "assistant":
            raise RowError(
                f"{row} has a last message of the role `{messages[-1]['role']}` in the column "
                f"`{name}`, expected `assistant`: the last message is the response.",
                "that do not end with the assistant's message",
            )
    before = better[:-1]
    if before != worse[:-1]:
        raise RowError(
            f"{row} has messages in `{columns.chosen}` and `{columns.rejected}` that differ before "
            "their last ones, expected two responses to one and the same prompt.",
            "whose responses follow different messages",
        )
    if columns.prompt is None:
        if not before:
            raise RowError(
                f"{row} has no prompt: `{columns.chosen}` holds the response only and "
                f"`{row / 'prompt_column'}` is null or names no column. Set it to that of the "
                "prompts.",
                "without a prompt",
            )
        return before
    given = question_of(row, prompt, columns.prompt)
    if not before:
        return given
    if _contents(given) != _contents(before[-len(given) :]):
        raise RowError(
            f"{row} has one prompt in the column `{columns.prompt}` and another before the "
            f"response in `{columns.chosen}`. To take the latter, set "
            f"`{row / 'prompt_column'}=null`.",
            "with two different prompts",
        )
    return before


def _contents(messages: list[Message]) -> list[Any]:
    contents = [message.get("content") for message in messages]
    return [text.strip() if isinstance(text, str) else text for text in contents]


def _margins(rows: pa.Table, margin_column: str | None, refused: RefusedRows) -> np.ndarray:
    if margin_column is None:
        return np.zeros(rows.num_rows, dtype=np.float32)

    def read(row: DataRow, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise RowError(
                f"{row} has {value!r} in the column `{margin_column}` (`{row / 'margin_column'}`), "
                "expected a finite number.",
                "without a margin",
            )
        return value

    values = column_of(rows, margin_column, refused.origin / "margin_column").to_pylist()
    return np.array(
        [math.nan if v is None else v for v in refused.map(read, values)], dtype=np.float32
    )

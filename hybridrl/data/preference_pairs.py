"""Tokenizing preference pairs: a chosen and a rejected response to one prompt, or the pairs of a
ranking."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.conversations.messages import Message
from hybridrl.data.encoding import append_end_token, encode_turns, find_end_token, trimmed
from hybridrl.data.message_cells import (
    add_system_message,
    check_cell_type,
    parse_prompt_messages,
    read_prompt_messages,
)
from hybridrl.data.row_origin import DataRow
from hybridrl.data.row_reader import RowReader, check_some, join_rows, only_rows
from hybridrl.data.task_blocks import TASK
from hybridrl.errors import DataError, RowError

_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant): ?")


class _ResponsePair(NamedTuple):
    """Two responses to a prompt, and how much better the first one is."""

    better: Any
    worse: Any
    margin: float


class _PairTexts(NamedTuple):
    prompt: str
    chosen: str
    rejected: str
    is_chat: bool
    margin: float = 0.0


def tokenize_preference_pairs(
    reader: RowReader,
    rows: pa.Table,
    prompt_column: str | None,
    chosen_column: str | None,
    rejected_column: str | None,
    margin_column: str | None = None,
    ranked_column: str | None = None,
    scores_column: str | None = None,
    task_column: str | None = None,
) -> Batch:
    """Tokenize pairs of responses to one prompt, the better one and the worse one.

    A response is a string, or a list of chat messages that ends with the assistant's. Such a list
    may hold the prompt too, as data sets of the hub often do; then `prompt_column` may be None or
    absent, and if it is there it must say the same. With None, so may a transcript
    (`parse_hh_transcript`). The answers to a chat go through the chat template as well.

    Args:
        margin_column: How much better the chosen answer is, a finite number; None: 0 for all.
        ranked_column: Lists of answers, of which `_list_ranked_pairs` makes the pairs, in place of
            the columns above; None: there are none.
        scores_column: Of the scores of those answers; None: the lists begin with the best one.
        task_column: Of the names of tasks; None: there are none.

    Returns:
        A batch with one row per pair: the token-level columns `prompt_ids`, `chosen_ids` and
        `rejected_ids`, both answers with the end-of-sequence token at their end, `margin`
        (float32), and with tasks `pair_task`. Pairs of two equal answers, and rows dropped as too
        long, are counted in a log message.

    Raises:
        DataError: if a column is missing, a row is malformed or too long (names the row, counting
            from 1), or no pair is left.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    refused, origin = reader.refused, reader.origin
    if ranked_column is not None:
        ranked = reader.cells(rows, ranked_column, "ranked_column")
        scores: list[Any] = [None] * len(ranked)
        if scores_column is not None:
            scores = reader.cells(rows, scores_column, "scores_column")
        sides: list[Sequence[Any]] = [ranked, scores]
        named = {"ranked_column": ranked_column}
        texts_of_rows: Sequence[Any] = [o for row in ranked if isinstance(row, list) for o in row]
    else:
        named = {"chosen_column": str(chosen_column), "rejected_column": str(rejected_column)}
        sides = [reader.cells(rows, name, setting) for setting, name in named.items()]
        texts_of_rows = sides[0]
        sides.append(_read_margins(reader, rows, margin_column))
    tasks = _read_tasks(reader, rows, task_column) if task_column is not None else None
    check_some(sides[0])
    names = [*named.values()]
    columns = _PairColumns(prompt_column, names[0], names[-1])
    if prompt_column is not None and (
        prompt_column in rows.column_names or any(isinstance(one, str) for one in texts_of_rows)
    ):
        prompts = reader.cells(rows, prompt_column, "prompt_column")
    else:
        prompts = [None] * rows.num_rows
        columns = columns._replace(prompt=None)

    def read(row: DataRow, tools: Any, prompt: Any, *cells: Any) -> list[_PairTexts]:
        if ranked_column is None:
            found = [_ResponsePair(*cells)]
        else:
            answers, of_answers = cells
            both = (ranked_column, scores_column)
            found = _list_ranked_pairs(row, answers, of_answers, both, reader.config.ranked_pairs)
        return [
            _read_pair(reader, row, tools, (prompt, one.better, one.worse), columns)._replace(
                margin=one.margin
            )
            for one in found
        ]

    found = reader.read(rows, read, prompts, *sides)
    pairs, numbers = join_rows(found, _PairTexts("", "", "", is_chat=False))
    row_numbers: list[int] = (numbers + 1).tolist()
    reader.check_system_prompt([pair.is_chat for one in found for pair in one or ()])
    end = find_end_token(reader.tokenizer)
    texts = [pair.prompt for pair in pairs]
    prompt_ids = reader.encode_prompts(texts, [pair.is_chat for pair in pairs], row_numbers)
    answers = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    chosen_ids, rejected_ids = (
        [
            ids
            if pair.is_chat
            else append_end_token(ids, end)  # a chat's template says where turns end
            for ids, pair in zip(encode_turns(side, reader.tokenizer, refused), pairs, strict=True)
        ]
        for side in answers
    )
    read_rows = np.flatnonzero(np.isin(numbers, refused.kept(len(found))))
    kept = read_rows[[pairs[row].chosen != pairs[row].rejected for row in read_rows]]
    said = "Dropped %d of %d pairs whose chosen and rejected responses are the same."
    refused.warn(said, (len(read_rows) - len(kept), len(read_rows)))
    for within in (
        reader.rows_within("prompt", prompt_ids, texts, read_rows, row_numbers),
        reader.rows_within("response", chosen_ids, answers[0], read_rows, row_numbers),
        reader.rows_within("response", rejected_ids, answers[1], read_rows, row_numbers),
    ):
        kept = np.intersect1d(kept, within)
    if not len(kept):
        columns_said = (f"`{name}` (`{origin / setting}`)" for setting, name in named.items())
        refused.doubt(
            DataError(
                f"No pair is left: in each, the responses in {' and '.join(columns_said)} are the "
                f"same, or `{origin / 'too_long'}=drop` dropped it."
            )
        )
    margins = np.array([pair.margin for pair in pairs], dtype=np.float32)
    columns_of_tokens = {"chosen_ids": chosen_ids, "rejected_ids": rejected_ids, "margin": margins}
    batch = Batch.from_columns({"prompt_ids": prompt_ids, **columns_of_tokens})
    if tasks is not None:
        batch = batch.with_columns({TASK: [tasks[number] for number in numbers]})
    return only_rows(batch, kept)


def split_pairs_into_samples(pairs: Batch) -> Batch:
    """Return two adjacent rows for each pair, the chosen response first.

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
    mask = RaggedColumn(torch.ones(len(ids), dtype=torch.uint8), cu_seqlens)
    return samples.with_columns({"response_mask": mask})


class _PairColumns(NamedTuple):
    prompt: str | None  # None: the prompts stand in the answers
    chosen: str
    rejected: str


def _read_pair(
    reader: RowReader, row: DataRow, tools: Any, cells: tuple[Any, ...], columns: _PairColumns
) -> _PairTexts:
    prompt, chosen, rejected = cells
    if columns.prompt is None:
        chosen, rejected = parse_hh_transcript(chosen), parse_hh_transcript(rejected)
        cells = (prompt, chosen, rejected)
    check_cell_type(row, chosen, columns.chosen, row / "chosen_column", may_be_empty=True)
    check_cell_type(row, rejected, columns.rejected, row / "rejected_column", may_be_empty=True)
    if type(chosen) is not type(rejected):
        raise RowError(
            f"{row} has a string in one of the columns `{columns.chosen}` and `{columns.rejected}` "
            "and a list of chat messages in the other; write both alike.",
            "with unlike responses",
        )
    if columns.prompt is not None:
        check_cell_type(row, prompt, columns.prompt, row / "prompt_column")
    elif isinstance(chosen, str):
        raise RowError(
            f"{row} has its responses as strings, which do not tell where the prompt ends, and "
            f"`{row / 'prompt_column'}` is null. Set it to the column of the prompts.",
            "without a prompt",
        )
    named = [(name, "*_column", cell) for name, cell in zip(columns, cells, strict=True)]
    if not reader.is_chat(row, tools, *named):
        ends = [trimmed(cell, reader.tokenizer) for cell in (chosen, rejected)]
        return _PairTexts(prompt, ends[0], ends[1], is_chat=False)
    better, worse = (parse_prompt_messages(row, cell, "assistant") for cell in (chosen, rejected))
    asked = add_system_message(
        reader.config.system_prompt, _read_shared_prompt(row, prompt, better, worse, columns)
    )
    (first,), (second,) = (
        reader.renderer.examples(row, [*asked, answer], [len(asked)], tools)
        for answer in (better[-1], worse[-1])
    )
    return _PairTexts(first[0], first[1], second[1], is_chat=True)


def _list_ranked_pairs(
    row: DataRow, responses: Any, scores: Any, columns: tuple[str, str | None], which: str
) -> list[_ResponsePair]:
    """Return the pairs of a ranking, the better response first; none of equal scores.

    Args:
        responses: Of the row, the best one first if there are no `scores`.
        scores: A number for each response, whose differences are the margins; None if `columns` has
            none.
        columns: Those of responses and scores, for messages.
        which: `all` pairs, or the `ends`, the best and the worst response.

    Raises:
        RowError: if they are no lists, of two responses at least and as many numbers.
    """
    if not isinstance(responses, list) or len(responses) < 2:
        raise RowError(
            f"{row} has {responses!r:.80} in the column `{columns[0]}` "
            f"(`{row / 'ranked_column'}`), expected a list of two responses or more.",
            "without two responses",
        )
    if columns[1] is None:
        values = [0.0] * len(responses)
    elif not (
        isinstance(scores, list)
        and all(map(_is_finite_number, scores))
        and len(scores) == len(responses)
    ):
        raise RowError(
            f"{row} has {scores!r:.80} in the column `{columns[1]}` (`{row / 'scores_column'}`), "
            f"expected a list of {len(responses)} finite numbers, one for each response.",
            "without a score for each response",
        )
    else:
        values = list(scores)
    order = sorted(range(len(responses)), key=lambda place: -values[place])
    places: Iterator[tuple[int, ...]] = combinations(order, 2)
    if which == "ends":
        places = iter([(order[0], order[-1])])
    found = [_ResponsePair(responses[a], responses[b], values[a] - values[b]) for a, b in places]
    return [pair for pair in found if columns[1] is None or pair.margin > 0]


def _is_finite_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def parse_hh_transcript(cell: Any) -> Any:
    """Parse a text whose messages begin with `Human: ` or `Assistant: ` after an empty line
    (Anthropic's HH-RLHF); return anything else unchanged."""
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


def _read_shared_prompt(
    row: DataRow,
    prompt: Any,
    better: list[Message],
    worse: list[Message],
    columns: _PairColumns,
) -> list[Message]:
    """Return the messages that precede both responses."""
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
    given = read_prompt_messages(row, prompt, columns.prompt)
    if not before:
        return given
    if _stripped_contents(given) != _stripped_contents(before[-len(given) :]):
        raise RowError(
            f"{row} has one prompt in the column `{columns.prompt}` and another before the "
            f"response in `{columns.chosen}`. To take the latter, set "
            f"`{row / 'prompt_column'}=null`.",
            "with two different prompts",
        )
    return before


def _stripped_contents(messages: list[Message]) -> list[Any]:
    contents = [message.get("content") for message in messages]
    return [text.strip() if isinstance(text, str) else text for text in contents]


def _read_tasks(reader: RowReader, rows: pa.Table, task_column: str) -> list[str]:
    def parse(value: Any) -> str | None:
        is_name = isinstance(value, int | str) and not isinstance(value, bool)
        return str(value) if is_name and str(value).strip() else None

    expected = "the name of an annotator, domain or user: text or a whole number"
    found = reader.values(rows, task_column, "task_column", parse, expected, "without a task")
    return ["" if name is None else name for name in found]


def _read_margins(
    reader: RowReader, rows: pa.Table, margin_column: str | None
) -> Sequence[float | None]:
    if margin_column is None:
        return [0.0] * rows.num_rows

    def parse(value: Any) -> float | None:
        return float(value) if _is_finite_number(value) else None

    expected = "a finite number"
    return reader.values(rows, margin_column, "margin_column", parse, expected, "without a margin")

"""The split into rows to learn from and rows to evaluate on; all rows of a prompt, or of a task,
are on one side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.data.row_keys import compute_tokens_keys
from hybridrl.data.supervised_tokens import CONVERSATION
from hybridrl.data.task_blocks import TASK

MAX_HELD_OUT_SHARE = 0.2
"""Of the rows, held out of data that has no others to evaluate on."""
_SEED_STREAM = 1
"""Beside the seed, so that these draws are not those of other purposes."""


class DataSplits(NamedTuple):
    """Tokenized rows by what they are for.

    Attributes:
        training: To learn from.
        held_out: To evaluate on; None if the data is too small to spare any.
        examples: Prompts with right answers, where a built-in task makes them beside prompts.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None = None


def split_held_out(rows: Batch, number: int, seed: int) -> DataSplits:
    """Draw rows to evaluate on, at most a fifth of all; rows of one prompt, or task, stay together,
    and both sides keep the order of the data.

    Args:
        rows: Tokenized, with `prompt_ids`.
        number: Rows to hold out.
        seed: Of the draw.
    """
    left = min(number, int(MAX_HELD_OUT_SHARE * len(rows)))
    is_held_out = _draw_prompts(rows, left, seed)
    if not is_held_out.any():
        return DataSplits(rows, None)
    training, held_out = (rows.take(np.flatnonzero(of)) for of in (~is_held_out, is_held_out))
    return DataSplits(training, held_out)


def _draw_prompts(rows: Batch, left: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return which rows are drawn: all of a prompt or none, at most `left`."""
    prompts = _number_prompts(rows)
    sizes = np.bincount(prompts)
    drawn = []
    for prompt in np.random.default_rng([_SEED_STREAM, seed]).permutation(len(sizes)):
        if sizes[prompt] <= left:
            drawn.append(prompt)
            left -= sizes[prompt]
        if not left:
            break
    return np.isin(prompts, drawn)


def sample_batch_rows(rows: Batch, number: int, seed: int) -> Batch:
    """Draw `number` of the rows, which keep their order; all rows if there are fewer. Tasks are
    drawn as wholes."""
    if TASK in rows and len(rows) > number:
        is_drawn = _draw_prompts(rows, number, seed)
        return rows.take(np.flatnonzero(is_drawn)) if is_drawn.any() else rows
    drawn = np.random.default_rng([_SEED_STREAM, seed]).permutation(len(rows))[:number]
    return rows if len(rows) <= number else rows.take(np.sort(drawn))


def _number_prompts(rows: Batch) -> npt.NDArray[np.int64]:
    """Return a number for each row that is the same for rows with the same prompt; they count from
    0 in the order of first appearance."""
    if TASK in rows:
        return np.unique(np.array(rows[TASK], dtype=object).astype(str), return_inverse=True)[1]
    keys = compute_tokens_keys(rows)
    if CONVERSATION in rows:  # whose rows have several prompts, each the beginning of the next
        heads = rows[CONVERSATION].numpy()
        _, first, inverse = np.unique(heads, return_index=True, return_inverse=True)
        keys = keys[first[inverse]]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]

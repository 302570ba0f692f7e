"""The split into rows to learn from and rows to evaluate on; all rows of a prompt are on one
side."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.data.supervised_examples import CONVERSATION

LARGEST_SHARE = 0.2
"""Of the rows, held out of data that has no others to evaluate on."""
_STREAM = 1
"""Beside the seed, so that these draws are not those of other purposes."""


def hold_out(rows: Batch, number: int, seed: int) -> tuple[Batch, Batch | None]:
    """Draw rows to evaluate on, at most a fifth of all; rows of one prompt stay together, and both
    sides keep the order of the data. All rows of a prompt are on one side, and in the order of the
    data.

    Args:
        rows: Tokenized, with `prompt_ids`.
        number: How many.
        seed: Of the draw.

    Returns:
        Rows to learn from, and rows to evaluate on (None if there are too few to spare any).
    """
    left = min(number, int(LARGEST_SHARE * len(rows)))
    prompts = _prompt_numbers(rows)
    sizes = np.bincount(prompts)
    drawn = []
    for prompt in np.random.default_rng([_STREAM, seed]).permutation(len(sizes)):
        if sizes[prompt] <= left:
            drawn.append(prompt)
            left -= sizes[prompt]
        if not left:
            break
    is_held_out = np.isin(prompts, drawn)
    if not is_held_out.any():
        return rows, None
    return rows.take(np.flatnonzero(~is_held_out)), rows.take(np.flatnonzero(is_held_out))


def draw_rows(rows: Batch, number: int, seed: int) -> Batch:
    """So many of the rows, in their order, or all if there are fewer."""
    drawn = np.random.default_rng([_STREAM, seed]).permutation(len(rows))[:number]
    return rows if len(rows) <= number else rows.take(np.sort(drawn))


def _prompt_numbers(rows: Batch) -> npt.NDArray[np.int64]:
    """Return a number for each row that is the same for rows with the same prompt."""
    if CONVERSATION in rows:  # whose rows have several prompts, each the beginning of the next
        heads = rows[CONVERSATION].numpy()
        first = dict(zip(heads[::-1].tolist(), _keys(rows)[::-1], strict=True))
        keys = [first[head] for head in heads.tolist()]
    else:
        keys = _keys(rows)
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _keys(rows: Batch) -> list[bytes]:
    ids = rows.ragged("prompt_ids")
    values, ends = ids.values.numpy(), ids.cu_seqlens.tolist()
    return [values[a:b].tobytes() for a, b in pairwise(ends)]

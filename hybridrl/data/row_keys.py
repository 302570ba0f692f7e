"""Keys of prompts: hashes by which rows with the same prompt are found, where prompts themselves
take too much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch

TOKENS_KEY, TEXT_KEY, ROW_KEY = "prompt_tokens_key", "prompt_text_key", "row_tokens_key"
"""Columns that rows of the cache have until a job begins: reading all tokens takes long."""
_TOKENS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
Keys = npt.NDArray[np.int64]
_NO_WORD = str.maketrans(dict.fromkeys("!\"#$%&'(),:;?@[\\]_`{|}~", " "))


def compute_tokens_keys(rows: Batch) -> Keys:
    """Return the key of each row's prompt, by its tokens."""
    return _find_keys(rows, TOKENS_KEY, _hash_tokens)


def compute_text_keys(rows: Batch, tokenizer: Any) -> Keys:
    """Return the key of each row's prompt, by its text without case, spaces and punctuation."""
    read = partial(read_prompt_texts, tokenizer=tokenizer)
    return _find_keys(rows, TEXT_KEY, lambda piece: hash_texts(map(normalize_text, read(piece))))


def compute_row_keys(rows: Batch) -> Keys | None:
    """Return the key of each row, by all its tokens; None if rows have none."""
    if not any(name in rows for name in _TOKENS):
        return None
    return _find_keys(rows, ROW_KEY, _hash_rows)


def add_keys(rows: Batch, tokenizer: Any) -> Batch:
    """Return the rows with their keys as columns."""
    return rows.with_columns(
        {
            TOKENS_KEY: compute_tokens_keys(rows),
            TEXT_KEY: compute_text_keys(rows, tokenizer),
            ROW_KEY: _hash_rows(rows),
        }
    )


def remove_keys(rows: Batch, *names: str) -> Batch:
    """Return the rows without these columns of keys, or without all."""
    removed = names or (TOKENS_KEY, TEXT_KEY, ROW_KEY)
    return rows.select(name for name in rows.columns if name not in removed)


def read_prompt_texts(rows: Batch, tokenizer: Any) -> list[str]:
    """Return the prompts as texts, decoded where rows have tokens only."""
    if "prompt" in rows.columns:
        return list(rows["prompt"])
    ids = rows.ragged("prompt_ids").rows()
    return list(tokenizer.batch_decode([row.tolist() for row in ids])) if len(rows) else []


def normalize_text(text: str) -> str:
    """Return the text without case, punctuation and repeated spaces."""
    return " ".join(text.lower().translate(_NO_WORD).split())


def hash_texts(texts: Iterable[str]) -> Keys:
    return _hash_values(text.encode("utf-8", "surrogatepass") for text in texts)


def _find_keys(rows: Batch, column: str, compute: Callable[[Batch], Keys]) -> Keys:
    """Return the keys in a column, and compute those of pieces without them, such as small sources
    of a mixture."""
    found = [np.empty(0, np.int64)]
    for piece in rows.pieces:
        has_keys = column in piece and not piece.table.column(column).null_count
        found.append(np.asarray(piece[column].numpy()) if has_keys else compute(piece))
    return np.concatenate(found)


def _hash_rows(rows: Batch) -> Keys:
    keys = [_hash_tokens(rows, name) for name in _TOKENS if name in rows]
    return _hash_values(row.tobytes() for row in np.stack(keys, axis=1))


def _hash_tokens(rows: Batch, name: str = "prompt_ids") -> Keys:
    ids = rows.ragged(name)
    values = ids.values.numpy()
    return _hash_values(values[a:b].tobytes() for a, b in pairwise(ids.cu_seqlens.tolist()))


def _hash_values(values: Iterable[bytes]) -> Keys:
    """Return a hash of 64 bits for each value; of a million, two are equal by chance in one of 30
    million data sets."""
    found = b"".join(blake2b(value, digest_size=8).digest() for value in values)
    return np.frombuffer(found, np.int64)

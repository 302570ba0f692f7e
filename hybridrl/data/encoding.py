"""Tokenizing prompts and responses, and the token that ends a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from hybridrl.conversations.rendering import special_tokens
from hybridrl.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.refused_rows import RefusedRows

_control_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()

TokenIds = npt.NDArray[np.int64]


def encode_prompts(
    texts: Sequence[str],
    is_chat: Sequence[bool],
    tokenizer: PreTrainedTokenizerBase,
    refused: RefusedRows,
    numbers: Sequence[int] | None = None,
) -> list[TokenIds]:
    """Tokenize each prompt; rendered chats contain their special tokens, plain strings get the
    tokenizer's.

    Args:
        refused: Gets rows whose prompt has no tokens.
        numbers: Numbers of the rows; None: they count from 1.
    """
    plain = [text for text, chatty in zip(texts, is_chat, strict=True) if text and not chatty]
    holding = sum(bool(special_token_pattern(tokenizer).search(text)) for text in plain)
    refused.warn(
        "%d of %d prompts hold control tokens of the tokenizer `%s` in their text, and are read "
        "with them, because strings are taken as they are.",
        (holding, len(plain)),
        tokenizer.name_or_path,
        unless_all=True,  # of rendered chats, all hold some
    )
    encoded: list[TokenIds] = [np.empty(0, np.int64)] * len(texts)
    for kind in (False, True):
        chosen = [number for number, chatty in enumerate(is_chat) if chatty is kind]
        if chosen:
            ids = tokenizer([texts[number] for number in chosen], add_special_tokens=not kind)
            for number, row in zip(chosen, ids["input_ids"], strict=True):
                encoded[number] = np.asarray(row, dtype=np.int64)
    _without_second_ends(encoded, texts, is_chat, tokenizer, refused)
    numbers = range(1, len(texts) + 1) if numbers is None else numbers
    for number, ids, text in zip(numbers, encoded, texts, strict=True):
        if not len(ids):
            said = "has a prompt that the tokenizer turns into no tokens"
            error = RowError(
                f"{refused.row(number)} {said}: {quote_excerpt(text)}", "with a prompt of no tokens"
            )
            refused.refuse(number, error)
    _warn_unknown_tokens(encoded, tokenizer, refused, "prompts")
    return encoded


def _without_second_ends(
    encoded: list[TokenIds],
    texts: Sequence[str],
    is_chat: Sequence[bool],
    tokenizer: PreTrainedTokenizerBase,
    refused: RefusedRows,
) -> None:
    """Take from plain prompts what the tokenizer adds wrongly: a beginning-of-sequence token
    before the one of a text that is rendered already, and an end-of-sequence token at the end,
    after which nothing is to be generated."""
    begin, end, twice = tokenizer.bos_token_id, tokenizer.eos_token_id, 0
    for row, text in enumerate(texts):
        ids = encoded[row]
        if is_chat[row]:
            continue
        begins = begin is not None and text.startswith(str(tokenizer.bos_token))
        if begins and len(ids) > 1 and ids[0] == ids[1] == begin:
            ids, twice = ids[1:], twice + 1
        ends = text.rstrip().endswith(str(tokenizer.eos_token))
        if end is not None and list(ids[-1 - ends :]) == [end] * (1 + ends):
            ids = ids[:-1]
        encoded[row] = ids
    refused.warn(
        "%d of %d prompts begin with `%s` already, which the tokenizer `%s` puts before each text: "
        "they get no second one.",
        (twice, len(texts)),
        tokenizer.bos_token,
        tokenizer.name_or_path,
    )


def encode_turns(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, refused: RefusedRows
) -> list[TokenIds]:
    """Tokenize each text as it stands, without adding special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    rows = [np.asarray(row, dtype=np.int64) for row in encoded]
    _warn_unknown_tokens(rows, tokenizer, refused, "answers")
    return rows


def special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern that matches every text that the tokenizer reads as a special token."""
    if tokenizer not in _control_tokens:
        names = map(re.escape, special_tokens(tokenizer))
        _control_tokens[tokenizer] = re.compile("|".join(names) or r"(?!)")
    return _control_tokens[tokenizer]


def find_end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the end-of-sequence token, which ends a response.

    Raises:
        DataError: if the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer `{tokenizer.name_or_path}` has no end-of-sequence token, so a model "
            "trained with it would never stop. Set `eos_token` in its tokenizer_config.json."
        )
    return int(tokenizer.eos_token_id)


def trimmed(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a response without the blanks behind an end-of-sequence token that it brings."""
    end, found = tokenizer.eos_token, text.rstrip()
    return found if isinstance(end, str) and found.endswith(end) else text


def append_end_token(ids: TokenIds, end: int) -> TokenIds:
    """Append the end token unless the ids end with it."""
    return ids if len(ids) and ids[-1] == end else np.append(ids, end)


def quote_excerpt(text: str) -> str:
    """Return the beginning of a text in quotes, for a message."""
    return repr(text if len(text) <= 80 else text[:80] + "...")


def shorten_value(value: object) -> str:
    """Return the beginning of a value's ASCII representation, for a message."""
    shown = ascii(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def _warn_unknown_tokens(
    encoded: Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    refused: RefusedRows,
    what: str,
) -> None:
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id == tokenizer.eos_token_id:
        return
    count = sum(bool((ids == tokenizer.unk_token_id).any()) for ids in encoded)
    refused.warn(
        "%d of %d %s hold text that the tokenizer `%s` does not know; the model sees `%s` in its "
        "place.",
        (count, len(encoded)),
        what,
        tokenizer.name_or_path,
        tokenizer.unk_token,
    )

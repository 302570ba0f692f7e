"""Turning rows into prompts: rendering chats, tokenizing, and checking lengths."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridrl.core.batch import Batch
from hybridrl.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class RenderedPrompts(NamedTuple):
    """The prompts as the model sees them: their text, and their token ids, one array per row."""

    texts: list[str]
    token_ids: list[npt.NDArray[np.int64]]


def tokenize_prompts(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str,
    answer_column: str | None,
    chat: bool | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int,
    too_long: Literal["error", "drop"] = "error",
) -> Batch:
    """Tokenizes the prompts of `rows`.

    A prompt is a string or a list of chat messages (`role`, `content`). `chat` says how it reaches
    the model: None renders lists of messages with the tokenizer's chat template and takes strings
    as they are; True also wraps a string as one user message; False allows strings only.
    `system_prompt` opens every chat that does not bring a system message of its own.

    Returns:
        A batch with the columns `prompt_ids` (token-level), `prompt` (the text as the model sees
        it), `answer` (text; empty without an answer), and every further column of `rows` unchanged,
        for reward functions to read. Rows dropped as too long are counted in a log message.

    Raises:
        DataError: if a column is missing, or a prompt is malformed, empty or too long; names the
            row, counting from 1.
        ConfigError: if the settings contradict each other or the tokenizer.
    """
    if too_long not in ("error", "drop"):
        raise ConfigError(f"`data.too_long` is `{too_long}`, expected `error` or `drop`.")
    answers = _answers(rows, answer_column)
    prompts = render_prompts(
        rows, tokenizer, prompt_column=prompt_column, chat=chat, system_prompt=system_prompt
    )
    lengths = np.array([len(ids) for ids in prompts.token_ids])
    kept = np.flatnonzero(lengths <= max_prompt_tokens)
    dropped = len(lengths) - len(kept)
    if dropped and too_long == "error":
        first = int(np.flatnonzero(lengths > max_prompt_tokens)[0])
        raise DataError(
            f"Row {first + 1} of the data has a prompt of {lengths[first]} tokens, more than "
            f"`data.max_prompt_tokens` ({max_prompt_tokens}); {dropped} of {len(lengths)} rows are "
            f"too long, the longest has {lengths.max()}. Raise `data.max_prompt_tokens`, or set "
            f"`data.too_long=drop`. The prompt begins: {_excerpt(prompts.texts[first])}"
        )
    if not len(kept):
        raise DataError(
            f"`data.too_long=drop` dropped all {dropped} rows: the shortest prompt has "
            f"{lengths.min()} tokens and `data.max_prompt_tokens` is {max_prompt_tokens}. Raise it."
        )
    if dropped:
        _log.warning(
            "Dropped %d of %d prompts that have more than %d tokens (`data.max_prompt_tokens`).",
            dropped,
            len(lengths),
            max_prompt_tokens,
        )
    columns = {
        "prompt_ids": prompts.token_ids,
        "prompt": pa.array(prompts.texts, pa.large_string()),
        "answer": pa.array(answers, pa.large_string()),
    }
    further = {name: rows.column(name) for name in rows.column_names if name not in columns}
    batch = Batch.from_columns(columns | further)
    return batch.take(kept) if dropped else batch


def render_prompts(
    rows: pa.Table,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str,
    chat: bool | None,
    system_prompt: str | None,
) -> RenderedPrompts:
    """Renders and tokenizes the column `prompt_column`; see `tokenize_prompts` for the rules."""
    prompts = column_of(rows, prompt_column, "data.prompt_column").to_pylist()
    if not prompts:
        raise DataError("There is nothing to tokenize: the data set has no rows.")
    texts: list[str] = []
    is_chat: list[bool] = []
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(
                f"Row {number} of the data has {prompt!r} in the column `{prompt_column}`, "
                "expected a string or a list of chat messages, not empty."
            )
        is_chat.append(isinstance(prompt, list) or chat is True)
        if is_chat[-1]:
            _check_chat(number, prompt, tokenizer, prompt_column, chat)
            texts.append(_render_chat(number, prompt, tokenizer, system_prompt))
        else:
            texts.append(prompt)
    if system_prompt is not None and not all(is_chat):
        raise ConfigError(
            "`data.system_prompt` is set, but the prompts are plain strings, which are taken as "
            "they are. Set `data.chat=true` to wrap each as a user message, or unset the system "
            "prompt."
        )
    # A chat template writes the special tokens itself; a plain string gets the tokenizer's own.
    encoded: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * len(texts)
    for kind in (False, True):
        chosen = [number for number, chatty in enumerate(is_chat) if chatty is kind]
        if chosen:
            ids = tokenizer([texts[number] for number in chosen], add_special_tokens=not kind)
            for number, row in zip(chosen, ids["input_ids"], strict=True):
                encoded[number] = np.asarray(row, dtype=np.int64)
    for number, row in enumerate(encoded, start=1):
        if not len(row):
            raise DataError(
                f"Row {number} of the data has a prompt that the tokenizer turns into no tokens: "
                f"{_excerpt(texts[number - 1])}"
            )
    _warn_of_unknown_tokens(encoded, tokenizer)
    return RenderedPrompts(texts, encoded)


def column_of(rows: pa.Table, name: str, setting: str) -> pa.ChunkedArray:
    """The column, or a `DataError` that names the setting and the nearest existing column."""
    if name not in rows.column_names:
        raise DataError(
            f"`{setting}` is `{name}`, but the data has no such column; it has "
            f"{', '.join(rows.column_names)}." + nearest(name, rows.column_names)
        )
    return rows.column(name)


def _answers(rows: pa.Table, answer_column: str | None) -> list[str]:
    if answer_column is None:
        return [""] * rows.num_rows
    return [_as_text(v) for v in column_of(rows, answer_column, "data.answer_column").to_pylist()]


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return str(value)


def _check_chat(
    number: int,
    prompt: str | list[Any],
    tokenizer: PreTrainedTokenizerBase,
    prompt_column: str,
    chat: bool | None,
) -> None:
    if chat is False:
        raise DataError(
            f"Row {number} of the data has chat messages in the column `{prompt_column}`, but "
            "`data.chat` is false, which allows strings only. Set `data.chat` to null or true."
        )
    if not tokenizer.chat_template:
        cause = "`data.chat` is true" if chat else f"the column `{prompt_column}` holds messages"
        raise ConfigError(
            f"{cause[0].upper()}{cause[1:]}, but the tokenizer `{tokenizer.name_or_path}` has no "
            "chat template. Use the tokenizer of an instruction-tuned model, set its "
            "`chat_template`, or give prompts as plain strings with `data.chat=false`."
        )


def _render_chat(
    number: int,
    prompt: str | list[Any],
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None,
) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(
                f"Row {number} of the data has a chat message that is no object with `role` and "
                f"`content`: {message!r}."
            )
    # Arrow gives every message the keys of all messages; a template must not see the empty ones.
    messages = [{key: v for key, v in m.items() if v is not None} for m in messages]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise jinja2 errors, among them their own complaints
        raise DataError(
            f"The chat template of `{tokenizer.name_or_path}` refuses row {number} of the data: "
            f"{error}"
        ) from error
    return str(text)


def _warn_of_unknown_tokens(
    encoded: list[npt.NDArray[np.int64]], tokenizer: PreTrainedTokenizerBase
) -> None:
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id == tokenizer.eos_token_id:
        return
    count = sum(bool((ids == tokenizer.unk_token_id).any()) for ids in encoded)
    if count:
        _log.warning(
            "%d of %d prompts hold text that the tokenizer `%s` does not know; the model sees `%s` "
            "in its place.",
            count,
            len(encoded),
            tokenizer.name_or_path,
            tokenizer.unk_token,
        )


def _excerpt(text: str, length: int = 80) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")

"""Chats: checking cells and messages of data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridrl.conversations.messages import (
    Message,
    from_sharegpt,
    joined_text,
    read_messages,
)
from hybridrl.data.encoding import quote_excerpt, shorten_value
from hybridrl.data.row_origin import DataRow
from hybridrl.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Those that most chat templates know; some have further ones."""


def check_cell_type(
    row: DataRow, cell: object, column: str, setting: str, *, may_be_empty: bool = False
) -> None:
    """Refuse a cell that is neither text nor a list of messages; the error names the setting of the
    column.

    Raises:
        DataError: naming the row; also for an empty list, and an empty text if none may be.
    """
    if isinstance(cell, str | list) and (cell or (may_be_empty and cell == "")):
        return
    raise RowError(
        f"{row} has {cell!r} in the column `{column}` (`{setting}`), expected a string or a list "
        f"of chat messages{'' if may_be_empty else ', not empty'}.",
        "without text or messages",
    )


def check_chat_allowed(
    row: DataRow,
    cell: str | list[Any],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    chat: bool | None,
) -> None:
    """Refuse a chat that the settings or the tokenizer do not allow; `chat` is `data.chat`.

    Raises:
        DataError: if the row has messages in `column` and only strings are allowed.
        ConfigError: if the tokenizer has no chat template.
    """
    chat_setting = row / "chat"
    if chat is False:
        raise RowError(
            f"{row} has chat messages in the column `{column}`, but `{chat_setting}` is false, "
            f"which allows strings only. Set `{chat_setting}` to null or true.",
            f"with messages where {chat_setting}=false",
        )
    if not tokenizer.chat_template:
        cause = f"`{chat_setting}` is true" if chat else f"the column `{column}` holds messages"
        raise ConfigError(
            f"{cause[0].upper()}{cause[1:]}, but the tokenizer `{tokenizer.name_or_path}` has no "
            "chat template. Use the tokenizer of an instruction-tuned model, set its "
            f"`chat_template`, or give prompts as plain strings with `{chat_setting}=false`."
        )


def check_no_nul(row: DataRow, text: str, column: str, setting: str) -> None:
    """Refuse text with NUL characters, which end a text in C.

    Raises:
        DataError: naming the row.
    """
    if "\0" in text:
        raise RowError(
            f"{row} has a NUL character (\\u0000) in the column `{column}` (`{setting}`), after "
            f"{quote_excerpt(text[: text.index(chr(0))][-40:])}. Remove it.",
            "with a NUL character",
        )


def parse_prompt_messages(row: DataRow, cell: str | list[Any], role: str = "user") -> list[Message]:
    """Return the cell as chat messages, as `read_messages` makes them; a string becomes one message
    of `role`.

    Raises:
        DataError: naming the row, if a message lacks `role` or `content`, has other than text, or
            calls no function by its name.
    """
    if isinstance(cell, str):
        cell = [{"role": role, "content": cell}]
    try:
        messages = from_sharegpt(cell)
    except ValueError as error:  # of a call
        raise _malformed(row, f"whose call is no JSON ({error})", cell) from error
    for message in messages:
        _check_message(row, message)
    return read_messages(messages)


def _check_message(row: DataRow, message: Any) -> None:
    is_whole = isinstance(message, dict) and "role" in message
    if not is_whole or not {"content", "tool_calls"} & message.keys():
        raise _malformed(row, "that is no object with `role` and `content`", message)
    role, calls = message["role"], message.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        expected = "Expected `system`, `user`, `assistant` or `tool`."
        raise _malformed(row, "without a role", message, expected)
    if role not in CHAT_ROLES and role.strip().lower() in CHAT_ROLES:
        raise RowError(
            f"{row} has a chat message of the role {role!r}; write `{role.strip().lower()}`, as "
            "chat templates do, which would take it for another.",
            "with an unknown role",
        )
    if not isinstance(calls, list) or not all(map(_has_name, calls)):
        raise _malformed(row, "whose `tool_calls` are no list of functions with names", message)
    content = message.get("content")
    if joined_text(content) is None and not (content is None and calls):
        raise RowError(
            f"{row} has a message of the role `{role}` whose content is no text: "
            f"{shorten_value(content)}. Models are trained on text only; leave the row out.",
            "with content that is no text",
        )


def _malformed(row: DataRow, why: str, message: Any, cure: str = "") -> RowError:
    said = f"{row} has a chat message {why}: {message!r}. {cure}"
    return RowError(said.rstrip(), "with malformed messages")


def _has_name(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def read_prompt_messages(row: DataRow, cell: str | list[Any], column: str) -> list[Message]:
    """Return the messages of a prompt; the last one must be for the assistant to answer.

    Raises:
        DataError: as `parse_prompt_messages`; also if the last one is the assistant's own, or
            empty.
    """
    messages = parse_prompt_messages(row, cell)
    last = messages[-1]
    if last["role"] == "assistant":
        raise RowError(
            f"{row} has a chat in the column `{column}` that ends with the assistant's message, so "
            "there is nothing to answer. Leave that message out, or put it into a column of its "
            "own.",
            "that end with the assistant's message",
        )
    if last["role"] != "tool" and not str(last.get("content", "")).strip():
        raise RowError(
            f"{row} has a chat in the column `{column}` whose last message, of the role "
            f"`{last['role']}`, is empty. Leave the row out.",
            "with an empty last message",
        )
    return messages


def add_system_message(system_prompt: str | None, messages: list[Message]) -> list[Message]:
    """Return the messages with the system prompt in front, unless they begin with a system
    message."""
    if system_prompt is None or messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]

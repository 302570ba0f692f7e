"""Chats: checking messages, rendering them with the tokenizer's template, finding the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.data.encoding import control_tokens, excerpt, shortened
from hybridrl.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
"""Those that most chat templates know; some have further ones."""


def check_cell(
    number: int, cell: object, column: str, setting: str, *, may_be_empty: bool = False
) -> None:
    """Refuses what is neither text nor a list of messages in `column`, which `setting` names.

    Raises:
        DataError: naming the row; also for an empty list, and an empty text if none may be.
    """
    if isinstance(cell, str | list) and (cell or (may_be_empty and cell == "")):
        return
    raise RowError(
        f"Row {number} of the data has {cell!r} in the column `{column}` (`{setting}`), expected a "
        f"string or a list of chat messages{'' if may_be_empty else ', not empty'}.",
        "without text or messages",
    )


def check_chat(
    number: int,
    cell: str | list[Any],
    tokenizer: PreTrainedTokenizerBase,
    column: str,
    chat: bool | None,
) -> None:
    """Refuses a chat that the settings or the tokenizer rule out; `chat` is `data.chat`.

    Raises:
        DataError: if row `number` has messages in `column` and only strings are allowed.
        ConfigError: if the tokenizer has no chat template.
    """
    if chat is False:
        raise RowError(
            f"Row {number} of the data has chat messages in the column `{column}`, but "
            "`data.chat` is false, which allows strings only. Set `data.chat` to null or true.",
            "with messages where data.chat=false",
        )
    if not tokenizer.chat_template:
        cause = "`data.chat` is true" if chat else f"the column `{column}` holds messages"
        raise ConfigError(
            f"{cause[0].upper()}{cause[1:]}, but the tokenizer `{tokenizer.name_or_path}` has no "
            "chat template. Use the tokenizer of an instruction-tuned model, set its "
            "`chat_template`, or give prompts as plain strings with `data.chat=false`."
        )


def check_system_prompt(system_prompt: str | None, is_chat: Sequence[bool]) -> None:
    """Refuses a system prompt for rows that are no chats: there is no place to put it."""
    if system_prompt is not None and not all(is_chat):
        raise ConfigError(
            "`data.system_prompt` is set, but the prompts are plain strings, which are taken as "
            "they are. Set `data.chat=true` to wrap each as a user message, or unset the system "
            "prompt."
        )


def check_text(number: int, text: str, column: str, setting: str) -> None:
    """Refuses text that nobody writes: NUL characters, which end a text in C.

    Raises:
        DataError: naming the row.
    """
    if "\0" in text:
        raise RowError(
            f"Row {number} of the data has a NUL character (\\u0000) in the column `{column}` "
            f"(`{setting}`), after {excerpt(text[: text.index(chr(0))][-40:])}. Remove it.",
            "with a NUL character",
        )


def messages_of(number: int, cell: str | list[Any], role: str = "user") -> list[Message]:
    """The cell as chat messages; a string is one message of `role`.

    Content that comes in parts, as for models that see pictures, becomes their text.

    Raises:
        DataError: naming the row, if a message lacks `role` or `content`, or has other than text.
    """
    messages = [{"role": role, "content": cell}] if isinstance(cell, str) else cell
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise RowError(
                f"Row {number} of the data has a chat message that is no object with `role` and "
                f"`content`: {message!r}.",
                "with malformed messages",
            )
    # Arrow gives every message the keys of all messages; a template must not see the empty ones.
    filled = [{key: v for key, v in m.items() if v is not None} for m in messages]
    for message in filled:
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise RowError(
                f"Row {number} of the data has a chat message without a role: {message!r}. "
                "Expected `system`, `user`, `assistant` or `tool`.",
                "with malformed messages",
            )
        if (role := message["role"]) not in ROLES and role.strip().lower() in ROLES:
            raise RowError(
                f"Row {number} of the data has a chat message of the role {role!r}; write "
                f"`{role.strip().lower()}`, as chat templates do, which would take it for another.",
                "with an unknown role",
            )
        if "content" in message or not message.get("tool_calls"):
            message["content"] = _text_of(number, message)
    return filled


def question_of(number: int, cell: str | list[Any], column: str) -> list[Message]:
    """The messages of a prompt, which the assistant is to answer.

    Raises:
        DataError: as `messages_of`; also if the last one is the assistant's own, or empty.
    """
    messages = messages_of(number, cell)
    last = messages[-1]
    if last["role"] == "assistant":
        raise RowError(
            f"Row {number} of the data has a chat in the column `{column}` that ends with the "
            "assistant's message, so there is nothing to answer. Leave that message out, or put it "
            "into a column of its own.",
            "that end with the assistant's message",
        )
    if last["role"] != "tool" and not str(last.get("content", "")).strip():
        raise RowError(
            f"Row {number} of the data has a chat in the column `{column}` whose last message, of "
            f"the role `{last['role']}`, is empty. Leave the row out.",
            "with an empty last message",
        )
    return messages


def _text_of(number: int, message: Message) -> str:
    """The content of a message, of which the template makes what it likes if it is no text."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        kinds = [part.get("type", "text") for part in content if isinstance(part, dict)]
        if content and all(isinstance(part, str) for part in parts) and set(kinds) <= {"text"}:
            content = "".join(parts)
    if not isinstance(content, str):
        raise RowError(
            f"Row {number} of the data has a message of the role `{message['role']}` whose content "
            f"is no text: {shortened(content)}. Models are trained on text only; leave the row "
            "out.",
            "with content that is no text",
        )
    return content


def open_with(system_prompt: str | None, messages: list[Message]) -> list[Message]:
    """The messages, after the system prompt if they bring none of their own."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def render(
    number: int, messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, ask: bool
) -> str:
    """The chat as text; with `ask`, followed by what opens the assistant's next turn.

    Raises:
        DataError: naming the row, if the template refuses it, or if the text of a message holds a
            control token, which would end or begin turns that nobody has taken.
    """
    for message in messages:
        content = message.get("content", "")
        check_text(number, content, "messages", "content")
        if found := control_tokens(tokenizer).search(content):
            raise RowError(
                f"Row {number} of the data has `{found.group()}` in the text of a message of the "
                f"role `{message['role']}`, which is a control token of the tokenizer "
                f"`{tokenizer.name_or_path}`: the model would not read it as text. Remove it, or "
                "write it otherwise.",
                "with a control token in a message",
            )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except Exception as error:  # templates raise jinja2 errors, among them their own complaints
        raise RowError(
            f"The chat template of `{tokenizer.name_or_path}` refuses row {number} of the data: "
            f"{error}",
            "that the chat template refuses",
        ) from error
    return str(text)


def cut_at_answers(
    number: int,
    messages: list[Message],
    answers: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Renders a chat and cuts it where the messages with the numbers `answers` begin and end.

    The chat ends with the last of the answers. An answer is what the model has to write after the
    template has opened its turn; it reaches up to the end-of-sequence token if the template closes
    a turn with it, and the space that the template leaves behind that token belongs to what
    follows.

    Returns:
        The pieces in turn: what precedes the first answer, that answer, what stands between it and
        the next one, and so on to the last answer.

    Raises:
        DataError: naming the row, if the template renders a turn in another way when the chat goes
            on after it, so that no piece of the text is the answer as the model would write it.
    """
    messages = messages[: answers[-1] + 1]
    whole = render(number, messages, tokenizer, ask=False)
    pieces: list[str] = []
    position = 0
    for place in answers:
        before = render(number, messages[:place], tokenizer, ask=True)
        upto = messages[: place + 1]
        after = whole if upto == messages else render(number, upto, tokenizer, ask=False)
        fits = whole.startswith(before) and whole.startswith(after)
        if not fits or not position <= len(before) < len(after):
            raise RowError(
                _does_not_fit(number, place, messages, tokenizer),
                "whose turns the chat template does not keep apart",
            )
        answer = _up_to_end(after[len(before) :], tokenizer)
        pieces += [whole[position : len(before)], answer]
        position = len(before) + len(answer)
    return pieces


def _up_to_end(answer: str, tokenizer: PreTrainedTokenizerBase) -> str:
    stripped = answer.rstrip()
    end = tokenizer.eos_token
    return stripped if isinstance(end, str) and stripped.endswith(end) else answer


def _does_not_fit(
    number: int, place: int, messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> str:
    cure = (
        "Give the response as a string and the prompt as rendered text, with `data.chat=false`."
        if place == len(messages) - 1
        else "Make one row of each of the assistant's messages instead: those before it as the "
        "prompt, and it as the response."
    )
    return (
        f"The chat template of `{tokenizer.name_or_path}` renders message {place + 1} of row "
        f"{number} of the data in another way when the chat ends there than when it goes on, so "
        "the tokens of the assistant's turn cannot be told from the others (templates that leave "
        f"out earlier reasoning do this). {cure}"
    )

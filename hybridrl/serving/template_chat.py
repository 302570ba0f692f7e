"""A renderer for any model with a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.conversations.messages import Message, ToolSchema, read_messages, read_tools
from hybridrl.conversations.rendering import (
    ChatTemplateError,
    TemplateContext,
    check_options,
    render_chat,
    special_tokens,
)
from hybridrl.errors import ConfigError
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.chat import ConversationError, ConversationRenderer
from hybridrl.serving.messages import AssistantTurn, ToolCall, format_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESPONSE_MARK = "hybridrl5e27answer"
"""Stands for what the model said while its surroundings are looked at."""
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class TemplateRenderer(ConversationRenderer):
    """A renderer by the tokenizer's chat template. Tool calls are parsed as `<tool_call>{"name":
    ..., "arguments": {...}}</tool_call>`, as many models write them. The calls of tools are looked
    for as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many models write them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: TemplateContext | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context or TemplateContext()
        self._special = special_tokens(tokenizer)

    def with_options(self, options: Mapping[str, Any]) -> TemplateRenderer:
        try:
            check_options(options, self.tokenizer, "chat_template_kwargs")
        except ConfigError as error:
            raise ConversationError(str(error)) from error
        return TemplateRenderer(self.tokenizer, self.context.with_options(options))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return self._tokens(self._text(messages, tools, ask=True))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], at: int, known: TurnTokens
    ) -> list[int] | None:
        before, answer, after = messages[:at], messages[at], messages[at + 1 :]
        opened = self._text(before, tools, ask=True)
        whole = self._text(messages, tools, ask=True)
        if not whole.startswith(opened) or not self._keeps(answer, whole[len(opened) :]):
            return None
        plain = {"role": "assistant", "content": _RESPONSE_MARK}
        head, closing = self._around(self._text([*before, plain], tools, ask=False))
        if head is None:
            return None
        turn = self._text([*before, answer], tools, ask=False)
        if turn.startswith(opened) and whole.startswith(turn):
            new = whole[len(turn) :]
        else:  # the last turn is written in another way than one in the middle
            marked = answer | {"content": _RESPONSE_MARK}
            head, new = self._around(self._text([*before, marked, *after], tools, ask=True))
            _, own = self._around(self._text([*before, marked], tools, ask=False))
            if head != opened or not new.startswith(own):
                return None
            new = new[len(own) :]
        ended = self._ended_by(known)
        if ended is not None and (shown := turn.rstrip()).endswith(ended):
            return [*known.prompt_ids, *known.token_ids, *self._tokens(turn[len(shown) :] + new)]
        given = self._tokens(closing + new)
        if given and known.token_ids[-1:] == given[:1]:
            given = given[1:]  # the model has closed its turn itself
        return [*known.prompt_ids, *known.token_ids, *given]

    def said(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSchema]
    ) -> AssistantTurn:
        if tools:
            text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
            calls, rest = _split_tool_calls(text)
            if calls:
                for token in self._special:
                    rest = rest.replace(token, "")
                return AssistantTurn(rest.strip(), calls)
        return AssistantTurn(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _ended_by(self, known: TurnTokens) -> str | None:
        """The control token that the model ended its turn with."""
        last = self.tokenizer.convert_ids_to_tokens(known.token_ids[-1:])
        return next((token for token in last if token in self._special), None)

    def _keeps(self, answer: Message, text: str) -> bool:
        """Return whether the rendered conversation contains the model's turn."""
        return str(answer.get("content") or "").strip() in text

    def _around(self, text: str) -> tuple[str | None, str]:
        """Return the text before and after the mark; None and an empty text unless it occurs
        exactly once. None and nothing if it is not there just once."""
        head, mark, tail = text.partition(_RESPONSE_MARK)
        return (head, tail) if mark and _RESPONSE_MARK not in tail else (None, "")

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, ask: bool) -> str:
        try:
            context = self.context.with_tools(read_tools(tools))
            return render_chat(self.tokenizer, read_messages(messages), context, ask=ask)
        except ChatTemplateError as error:
            raise ConversationError(f"The chat template refuses these messages: {error}") from error

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _split_tool_calls(text: str) -> tuple[tuple[ToolCall, ...], str]:
    """Return the well-formed tool calls of a text, and the text without them."""
    calls = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            calls.append(ToolCall(str(call["name"]), format_arguments(call.get("arguments", {}))))
        except (ValueError, KeyError, TypeError, AttributeError):
            return match[0]  # the program sees what the model wrote
        return ""

    rest = _TOOL_CALL.sub(take, text)
    return tuple(calls), rest

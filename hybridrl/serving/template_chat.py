"""A renderer for any model with a chat template: messages become tokens, and tokens messages.

Tokens of earlier turns are never made again from their text: what a model sampled need not be what
its tokenizer makes of that, and a policy trained on other tokens than it sampled learns from
log-probabilities that were never its own. So of a conversation that goes on, only what is new is
tokenized.
"""

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
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.messages import AssistantTurn, ToolCall, format_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESPONSE_MARK = "hybridrl5e27answer"
"""Stands for what the model said while its surroundings are looked at."""
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ConversationError(HybridRLError):
    """The chat template refuses a conversation, or options of it; the message quotes it."""


class TemplateRenderer:
    """A renderer for the conversations of one model, by its tokenizer's chat template.

    Tool calls are parsed as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many
    models write them.

    Attributes:
        stop_token_ids: Tokens that end a turn, besides the model's own.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: TemplateContext | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context or TemplateContext()
        self._special = special_tokens(tokenizer)

    def with_options(self, options: Mapping[str, Any]) -> TemplateRenderer:
        """Return the renderer whose template has these variables, which win over those of the job.

        Raises:
            ConversationError: if the template does not read one of them.
        """
        try:
            check_options(options, self.tokenizer, "chat_template_kwargs")
        except ConfigError as error:
            raise ConversationError(str(error)) from error
        return TemplateRenderer(self.tokenizer, self.context.with_options(options))

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Return the tokens of a conversation that the model is to continue.

        Raises:
            ConversationError: if the template refuses it.
        """
        return self._tokens(self._text(messages, tools, ask=True))

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], at: int, known: TurnTokens
    ) -> list[int] | None:
        """Return the tokens of a conversation in which an earlier turn keeps its sampled tokens.

        Args:
            at: The message that is this turn; only others than the assistant's follow.
            known: The turn.

        Returns:
            All tokens of the turn, then what is new; None if the template does not keep what it
            wrote before, as those do that leave out what was thought in earlier turns.
        """
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
        """Parse the tokens of a turn into text, reasoning and tool calls."""
        if tools:
            text = str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))
            calls, rest = _split_tool_calls(text)
            if calls:
                for token in self._special:
                    rest = rest.replace(token, "")
                return AssistantTurn(rest.strip(), calls)
        return AssistantTurn(str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)))

    def _ended_by(self, known: TurnTokens) -> str | None:
        """Return the control token that the model ended its turn with."""
        last = self.tokenizer.convert_ids_to_tokens(known.token_ids[-1:])
        return next((token for token in last if token in self._special), None)

    def _keeps(self, answer: Message, text: str) -> bool:
        """Return whether the rendered conversation contains the model's turn."""
        return str(answer.get("content") or "").strip() in text

    def _around(self, text: str) -> tuple[str | None, str]:
        """Return the text before and after the mark; None and an empty text unless it occurs
        exactly once."""
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

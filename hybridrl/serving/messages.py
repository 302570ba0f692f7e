"""Messages as the model answered them, and how programs name conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.conversations.messages import Message, ToolSchema, parsed_arguments


class ToolCall(NamedTuple):
    """A tool call of the model.

    Attributes:
        arguments: JSON, as text.
    """

    name: str
    arguments: str


class AssistantTurn(NamedTuple):
    """A parsed turn of the model: content, tool calls and reasoning.

    Attributes:
        reasoning: What it thought before, where the model's format tells that apart.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def cut_at(self, stops: Sequence[str]) -> AssistantTurn:
        """Return the turn truncated at the first of these stop texts."""
        places = [place for stop in stops if (place := self.content.find(stop)) >= 0]
        return self._replace(content=self.content[: min(places)]) if places else self

    def after(self, before: AssistantTurn) -> AssistantTurn:
        """Return what this turn adds to an earlier part of it."""
        reasoning, known = self.reasoning or "", before.reasoning or ""
        return AssistantTurn(
            self.content[len(before.content) :] if self.content.startswith(before.content) else "",
            self.calls,
            reasoning[len(known) :] if reasoning.startswith(known) else None,
        )

    def held_back(self, stops: Sequence[str]) -> AssistantTurn:
        """Return the turn without an ending that more tokens may change: half a character, or the
        beginning of a stop text."""
        content = self.content.rstrip("\ufffd")
        ends = (
            length
            for stop in stops
            for length in range(min(len(stop) - 1, len(content)), 0, -1)
            if content.endswith(stop[:length])
        )
        return self._replace(content=content[: len(content) - max(ends, default=0)])

    def message(self, call_ids: Sequence[str]) -> Message:
        """Return the turn as a message of OpenAI's API.

        Args:
            call_ids: One for each call.
        """
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": call._asdict()}
                for call_id, call in zip(call_ids, self.calls, strict=True)
            ]
        return message


def make_call_ids(seed: int, count: int) -> list[str]:
    """Return ids for the tool calls of a turn, reproducible from the seed, of the nine alphanumeric
    characters that some templates require."""
    digests = (hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count))
    return [digest[:9] for digest in digests]


def compute_conversation_key(
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return a key for a conversation.

    Conversations with the same key mean the same: ids of calls, what was thought, and how JSON is
    written make no difference, for programs lose or rewrite these.
    """
    digest = hashlib.sha256(json.dumps([list(tools), dict(options or {})], sort_keys=True).encode())
    for message in messages:
        meaning: list[Any] = [message["role"], message.get("content") or ""]
        for call in message.get("tool_calls") or []:
            meaning.append([call["function"]["name"], parsed_arguments(call)])
        if message["role"] == "tool":
            meaning.append([message.get("name"), message.get("tool_call_id")])
        digest.update(json.dumps(meaning, sort_keys=True).encode())
    return digest.hexdigest()


def format_arguments(arguments: Any) -> str:
    """Return the arguments of a tool call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

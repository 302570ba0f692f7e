"""Messages and tools, however they are written, in the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
ToolSchema = dict[str, Any]
SHAREGPT = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"},
    **{"bard": "assistant", "observation": "tool", "function_response": "tool"},
}
"""Roles by what speakers are called in ShareGPT's dumps and those that follow them."""


def read_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as templates expect them. Read each message once: nulls inside `arguments`
    that came as text are the model's own and would be dropped the second time.

    Keys that are null are dropped at every depth, because Arrow gives each object the keys of all.
    Content in parts of text is joined, missing content is empty, `developer` is `system`, calls
    have the form `{"type": "function", "function": {...}}`, and their arguments are objects.
    """
    found = []
    for message in messages:
        message = without_nulls(message)
        if message.get("role") == "developer":
            message["role"] = "system"
        content = message.get("content", "")
        message["content"] = content if (text := joined_text(content)) is None else text
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_read_call(call) for call in calls]
        else:
            message.pop("tool_calls", None)
        found.append(message)
    return found


def from_sharegpt(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose keys are `role` and `content` where they are ShareGPT's `from` and
    `value`; a `function_call`, whose value is JSON, becomes a call of a tool."""
    return [_from_sharegpt(one) if isinstance(one, dict) else one for one in messages]


def _from_sharegpt(message: Message) -> Message:
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker, said = message["from"], message["value"]
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_parsed(said)]}
    return {"role": SHAREGPT.get(speaker, speaker), "content": said}


def read_tools(tools: Any) -> list[ToolSchema]:
    """Return the functions that a model may call, from objects or JSON text, with or without the
    `{"type": "function", "function": {...}}` around each.

    Raises:
        ValueError: if it is no list of functions with names.
    """
    found = []
    for tool in _parsed(tools) or []:
        tool = without_nulls(_parsed(tool))
        tool = tool if "function" in tool else {"type": "function", "function": tool}
        if not isinstance(tool["function"], dict) or not isinstance(tool["function"]["name"], str):
            raise ValueError("a function has no name")
        found.append(tool)
    return found


def without_nulls(value: Any) -> Any:
    """Return a copy without the keys of objects that are null, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def joined_text(content: Any) -> str | None:
    """Return the text of a message's content, whose parts are joined; None if it is not all text.

    Parts are `{"type": "text", "text": ...}` or strings.
    """
    if isinstance(content, list) and content:
        kinds = {part.get("type", "text") for part in content if isinstance(part, dict)}
        parts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in content]
        if kinds <= {"text"} and all(isinstance(part, str) for part in parts):
            return "".join(parts)
    return content if isinstance(content, str) else None


def parsed_arguments(call: Message) -> Any:
    """Return the arguments of a call: an object, or the text itself if it is not JSON."""
    arguments = call["function"].get("arguments", {})
    try:
        return _parsed(arguments)
    except ValueError:
        return arguments


def _read_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    call = call if "function" in call else {"type": "function", "function": call}
    function = call["function"]
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": parsed_arguments(call)}}


def _parsed(value: Any) -> Any:
    """JSON text as what it says; anything else as it is."""
    return json.loads(value) if isinstance(value, str) else value

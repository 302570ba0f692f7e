"""Requests as programs write them: what is understood of OpenAI's API, and how the rest is refused.

Also `/inference/v1/generate` of vLLM, as verifiers and its renderers use it: token ids in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.conversations.messages import Message, Tool
from hybridrl.environments.adapters.environment_adapter import fault_of
from hybridrl.serving.fields import RefusedError, are_tokens, is_number, is_token, read, wrong

ROLES = {"system", "developer", "user", "assistant", "tool"}
MOST_SAMPLES = 128
MOST_STOPS = 32
_AS_TEMPLATED = (
    *(("chat_template", None), ("documents", None)),
    *(("add_generation_prompt", True), ("continue_final_message", False)),
)
"""Fields that would have other tokens than the template's, and what they may be."""


@dataclass(frozen=True)
class Wishes:
    """What a request says of the answer.

    Attributes:
        samples: Answers to each prompt.
        max_tokens, min_tokens: Of an answer.
        stop: Texts that end it, and are left out of it.
        stop_token_ids: Tokens that end it.
        temperature, top_p, top_k, seed: Heard only where nothing is learned from the answer.
        streams: The answer is wanted as it comes.
        with_usage: A stream is to end with the numbers of tokens.
        log_probs: Those of tokens are wanted as OpenAI writes them.
        alternatives: Tokens to tell for each place; only the one that was sampled is known.
        with_prompt_ids: The prompt's tokens are wanted.
    """

    samples: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    streams: bool = False
    with_usage: bool = False
    log_probs: bool = False
    alternatives: int = 0
    with_prompt_ids: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """Of `/v1/chat/completions`.

    Attributes:
        may_call: Whether a call of a tool is one, or just text.
        options: Variables of the chat template.
    """

    model: str | None
    messages: list[Message]
    tools: list[Tool]
    may_call: bool
    options: dict[str, Any]
    wishes: Wishes


@dataclass(frozen=True)
class CompletionRequest:
    """Of `/v1/completions`: prompts as text, or as tokens."""

    model: str | None
    prompts: list[str | list[int]]
    wishes: Wishes


@dataclass(frozen=True)
class GenerateRequest:
    """Of `/inference/v1/generate`."""

    model: str | None
    token_ids: list[int]
    wishes: Wishes


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Reads the body of a request for a chat completion.

    Raises:
        RefusedError: names what is missing, of a wrong type, or not supported.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list of messages, not empty")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise wrong("tools", "must be a list of functions with names")
    choice = body.get("tool_choice") or "auto"
    # Agents ask for calls as a matter of course. What is learned from is what the model samples by
    # itself, so whether it calls is up to it.
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise wrong("tool_choice", "must be `auto`, `none`, `required` or the name of a function")
    shape = body.get("response_format") or {"type": "text"}
    if not isinstance(shape, dict) or shape.get("type") != "text":
        raise wrong("response_format", "must be of the type `text`; others are not supported")
    for name, plain in _AS_TEMPLATED:
        if body.get(name) not in (None, plain):
            raise wrong(name, "is not supported: the model's own chat template asks for an answer")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise wrong("chat_template_kwargs", "must be an object of variables of the chat template")
    if (effort := read(body, "reasoning_effort", str, None)) is not None:
        options = {"reasoning_effort": effort, **options}
    limit = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    log_probs = read(body, "logprobs", bool, False)
    wishes = _wishes(
        body,
        max_tokens=read(body, limit, int, None, least=1),
        log_probs=log_probs,
        alternatives=read(body, "top_logprobs", int, 0, least=0, most=20) if log_probs else 0,
    )
    return ChatRequest(
        read(body, "model", str, None),
        [_message(message, number) for number, message in enumerate(messages)],
        tools,
        bool(tools) and choice != "none",
        options,
        wishes,
    )


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Reads the body of a request for a completion; see `chat_request`."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not all(map(is_token, prompt))
    prompts = prompt if several else [prompt]
    if not all(isinstance(one, str) or are_tokens(one) for one in prompts) or prompt == []:
        raise wrong("prompt", "must be text, tokens, or a list of these")
    for name, plain in (("echo", False), ("best_of", 1), ("suffix", None)):
        if body.get(name) not in (None, plain):
            raise wrong(name, "is not supported")
    log_probs = read(body, "logprobs", int, None, least=0, most=20)
    wishes = _wishes(
        body,
        max_tokens=read(body, "max_tokens", int, 16, least=1),
        log_probs=log_probs is not None,
        alternatives=log_probs or 0,
    )
    return CompletionRequest(read(body, "model", str, None), list(prompts), wishes)


def generate_request(body: Mapping[str, Any]) -> GenerateRequest:
    """Reads the body of a request for tokens; see `chat_request`. Further keys are left alone."""
    token_ids = body.get("token_ids")
    if not are_tokens(token_ids) or not token_ids:
        raise wrong("token_ids", "must be a list of token ids, not empty")
    if body.get("features") or body.get("content_parts"):
        raise wrong("features", "is not supported: models here read text only")
    if body.get("stream"):
        raise wrong("stream", "is not supported here")
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise wrong("sampling_params", "must be an object")
    max_tokens = read(parameters, "max_tokens", int, None, least=1)
    return GenerateRequest(
        read(body, "model", str, None), token_ids, _wishes(parameters, max_tokens=max_tokens)
    )


def report_of(body: Mapping[str, Any]) -> tuple[float, list[float] | None, dict[str, float]]:
    """What a program says of its episode: the reward, those of the turns, further numbers."""
    reward = read(body, "reward", float, None)
    if reward is None:
        raise wrong("reward", "must be a number")
    turns, metrics = body.get("turn_rewards"), body.get("metrics") or {}
    if turns is not None and not (isinstance(turns, list) and all(map(is_number, turns))):
        raise wrong("turn_rewards", "must be a list of numbers")
    if not isinstance(metrics, dict) or not all(map(is_number, metrics.values())):
        raise wrong("metrics", "must be an object of numbers")
    found = (
        float(reward),
        None if turns is None else [float(x) for x in turns],
        {name: float(value) for name, value in metrics.items()},
    )
    if (fault := fault_of(*found)) is not None:
        raise RefusedError(400, f"This reports {fault}.")
    return found


def _wishes(body: Mapping[str, Any], **further: Any) -> Wishes:
    """What all kinds of requests say in the same words."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", "must be an object")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", "must be text or a list of texts")
    if len(stops) > MOST_STOPS:
        raise wrong("stop", f"must have at most {MOST_STOPS} texts")
    stop_token_ids = body.get("stop_token_ids") or []
    if not are_tokens(stop_token_ids):
        raise wrong("stop_token_ids", "must be a list of token ids")
    return Wishes(
        samples=read(body, "n", int, 1, least=1, most=MOST_SAMPLES),
        min_tokens=read(body, "min_tokens", int, 0, least=0),
        stop=tuple(stop for stop in stops if stop),
        stop_token_ids=tuple(stop_token_ids),
        temperature=read(body, "temperature", float, None, least=0),
        top_p=read(body, "top_p", float, None, least=0, most=1),
        top_k=read(body, "top_k", int, None, least=-1),
        seed=read(body, "seed", int, None),
        streams=read(body, "stream", bool, False),
        with_usage=read(options, "include_usage", bool, False),
        with_prompt_ids=read(body, "return_token_ids", bool, False),
        **further,
    )


def _message(message: Any, number: int) -> Message:
    """A message with its content as one text."""
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        raise wrong(name, "must be an object")
    if (role := message.get("role")) not in ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(sorted(ROLES))}")
    found = dict(message) | {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise wrong(f"{name}.content", "has parts that are no text; the model reads text only")
        found["content"] = content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise wrong(f"{name}.content", "must be text, or a list of parts of text")
    if content is None and not message.get("tool_calls") and role != "assistant":
        raise wrong(f"{name}.content", "is missing")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise wrong(f"{name}.tool_calls", "must be a list of calls of functions")
    return found


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and _has_name(tool.get("function"))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return _has_name(function) and isinstance(function.get("arguments"), str)


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)

"""Requests as programs write them: what is understood of OpenAI's API, and how the rest is refused.

Also `/inference/v1/generate` of vLLM, as verifiers and its renderers use it: token ids in and out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from hybridrl.conversations.messages import Message, ToolSchema
from hybridrl.environments.adapters.environment_adapter import fault_of

MAX_SAMPLES = 128
MAX_STOPS = 32
_KINDS = {401: "authentication_error", 403: "permission_error"}
_KINDS |= {404: "not_found_error", 429: "rate_limit_error"}
_NOT_TEMPLATED = "is not supported: the model's own chat template asks for an answer"


class ApiError(Exception):
    """An error reply in OpenAI's format."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> Mapping[str, Any]:
        others = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, others)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def make_field_error(name: str, what: str) -> ApiError:
    return ApiError(400, f"`{name}` {what}.", param=name)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request as a JSON object.

    Raises:
        ApiError: if it is none.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body of the request is no valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body of the request must be a JSON object.")
    if b"\\ud" in raw.lower():  # halves of characters may be written so, and no tokenizer takes one
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400,
                f"The body of the request is no valid text: {error.reason} (half of an emoji?).",
            ) from error
    return body


def _field(must: str, default: Any = ..., **limits: Any) -> Any:
    """Return a field with the sentence, without its name, that refuses another value."""
    return Field(default, description=must, **limits)


class _Object(BaseModel):
    """An object in JSON. A field that is null is one that is missing; others are left alone."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        is_object = isinstance(value, dict)
        return {k: v for k, v in value.items() if v is not None} if is_object else value


_Token = Annotated[int, Field(ge=0)]
_Nothing = Annotated[None, BeforeValidator(lambda value: value or None)]


class _StreamOptions(_Object):
    include_usage: bool = _field("must be true or false", False)


class GenerationOptions(_Object):
    """The options of a request that say how to sample and what to reply.

    Attributes:
        n: Answers to each prompt.
        max_tokens, min_tokens: Of an answer.
        stop: Texts that end it, and are left out of it.
        stop_token_ids: Tokens that end it.
        temperature, top_p, top_k, seed: Heard only where nothing is learned from the answer.
        stream: The answer is wanted as it comes.
        return_token_ids: The prompt's tokens are wanted.
    """

    model: str | None = _field("must be text", None)
    n: int = _field(f"must be a whole number from 1 to {MAX_SAMPLES}", 1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = _field("must be a whole number, 1 or more", None, ge=1)
    min_tokens: int = _field("must be a whole number, 0 or more", 0, ge=0)
    stop: list[str] = _field(
        f"must be text or a list of at most {MAX_STOPS} texts", [], max_length=MAX_STOPS
    )
    stop_token_ids: list[_Token] = _field("must be a list of token ids", [])
    temperature: float | None = _field("must be a number, 0 or more", None, ge=0)
    top_p: float | None = _field("must be a number from 0 to 1", None, ge=0, le=1)
    top_k: int | None = _field("must be a whole number, -1 or more", None, ge=-1)
    seed: int | None = _field("must be a whole number", None)
    stream: bool = _field("must be true or false", False)
    stream_options: _StreamOptions = _field("must be an object", _StreamOptions())
    return_token_ids: bool = _field("must be true or false", False)

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        return [one for one in stops if one != ""] if isinstance(stops, list) else stops

    @property
    def longest(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Tokens to tell for each place, of which only the one that was sampled is known; None: the
        log-probabilities of tokens are not wanted as OpenAI writes them."""
        return None


class _Function(_Object):
    name: str


class _Tool(_Object):
    function: _Function


class _CalledFunction(_Function):
    arguments: str


class _Call(_Object):
    function: _CalledFunction


class _TextPart(_Object):
    text: str


class _Message(_Object):
    role: Literal["assistant", "developer", "system", "tool", "user"] = _field(
        "must be one of assistant, developer, system, tool, user"
    )
    tool_calls: list[_Call] = _field("must be a list of calls of functions", [])
    content: str | list[_TextPart] | None = _field(
        "must be text, or a list of parts of text: the model reads text only, and only an "
        "assistant's message may have none",
        None,
        validate_default=True,
    )

    @field_validator("role")
    @classmethod
    def _as_templates_have_it(cls, role: str) -> str:
        return "system" if role == "developer" else role

    @field_validator("content")
    @classmethod
    def _joined(cls, content: Any, info: ValidationInfo) -> Any:
        has_calls = info.data.get("tool_calls")
        if content is None and not has_calls and info.data.get("role", "assistant") != "assistant":
            raise ValueError("is missing")
        return "".join(p.text for p in content) if isinstance(content, list) else content


class _ResponseFormat(_Object):
    type: Literal["text"] = "text"


class ChatCompletionRequest(GenerationOptions):
    """The body of `/v1/chat/completions`. Agents ask for calls of tools as a matter of course. What
    is learned from is what the model samples by itself, so whether it calls is up to it."""

    messages: list[_Message] = _field("must be a list of messages, not empty", min_length=1)
    tools: list[_Tool] = _field("must be a list of functions with names", [])
    tool_choice: dict[str, Any] | Literal["auto", "none", "required"] = _field(
        "must be `auto`, `none`, `required` or the name of a function", "auto"
    )
    response_format: _ResponseFormat = _field(
        "must be of the type `text`; others are not supported", _ResponseFormat()
    )
    chat_template: None = _field(_NOT_TEMPLATED, None)
    documents: None = _field(_NOT_TEMPLATED, None)
    add_generation_prompt: Literal[True] = _field(_NOT_TEMPLATED, True)
    continue_final_message: Literal[False] = _field(_NOT_TEMPLATED, False)
    chat_template_kwargs: dict[str, Any] = _field(
        "must be an object of variables of the chat template", {}
    )
    reasoning_effort: str | None = _field("must be text", None)
    max_completion_tokens: int | None = _field("must be a whole number, 1 or more", None, ge=0)
    logprobs: bool = _field("must be true or false", False)
    top_logprobs: int = _field("must be a whole number from 0 to 20", 0, ge=0, le=20)

    @cached_property
    def conversation(self) -> list[Message]:
        """The messages as they are given, but with `system` for `developer`, and the content of
        each as one text."""
        return [
            {**given, "role": read.role, **({"content": read.content} if read.content else {})}
            for given, read in zip(self._given["messages"], self.messages, strict=True)
        ]

    @property
    def functions(self) -> list[ToolSchema]:
        """The tools as they are given."""
        return list(self._given.get("tools") or [])

    @property
    def may_call(self) -> bool:
        """True if the model may call tools; if not, text that looks like a call is text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def options(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = self.reasoning_effort
        return ({} if effort is None else {"reasoning_effort": effort}) | self.chat_template_kwargs

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TextCompletionRequest(GenerationOptions):
    """The body of `/v1/completions`: prompts as text, or as tokens."""

    prompt: str | Annotated[list[_Token], Field(min_length=1)] | list[str | list[_Token]] = _field(
        "must be text, tokens, or a list of these"
    )
    max_tokens: int = _field("must be a whole number, 1 or more", 16, ge=1)
    echo: Literal[False] = _field("is not supported", False)
    best_of: Literal[1] = _field("is not supported", 1)
    suffix: None = _field("is not supported", None)
    logprobs: int | None = _field("must be a whole number from 0 to 20", None, ge=0, le=20)

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return prompt if several else [prompt]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class TokenGenerateRequest(_Object):
    """The body of `/inference/v1/generate`."""

    model: str | None = _field("must be text", None)
    token_ids: list[_Token] = _field("must be a list of token ids, not empty", min_length=1)
    features: _Nothing = _field("is not supported: models here read text only", None)
    content_parts: _Nothing = _field("is not supported: models here read text only", None)
    stream: Literal[False] = _field("is not supported here", False)
    sampling_params: dict[str, Any] = _field("must be an object", {})

    @cached_property
    def options(self) -> GenerationOptions:
        """The sampling parameters.

        Raises:
            ApiError: as `parse`.
        """
        options = parse(GenerationOptions, self.sampling_params)
        if options.stream:
            raise make_field_error("sampling_params.stream", "is not supported here")
        return options


class EpisodeReport(_Object):
    """The reward that a program reports of its episode."""

    reward: float = _field("must be a number")
    turn_rewards: list[float] | None = _field("must be a list of numbers", None)
    metrics: dict[str, float] = _field("must be an object of numbers", {})

    @model_validator(mode="after")
    def _is_bounded(self) -> EpisodeReport:
        if (fault := fault_of(self.reward, self.turn_rewards, self.metrics)) is not None:
            raise ApiError(400, f"This reports {fault}.")
        return self


_Parsed = TypeVar("_Parsed", bound=_Object)


def parse(kind: type[_Parsed], body: Mapping[str, Any]) -> _Parsed:
    """Validate the body of a request.

    Raises:
        ApiError: names what is missing, of a wrong type, out of range or not supported.
    """
    try:
        parsed = kind.model_validate(body)
    except ValidationError as error:
        name, *rest = error.errors(include_url=False, include_context=False)[0]["loc"]
        shown, must = str(name), str(kind.model_fields[str(name)].description)
        if name == "messages" and rest:
            shown, must = f"messages[{rest[0]}]", "must be an object"
            for field in rest[1:2]:
                shown, must = f"{shown}.{field}", str(_Message.model_fields[str(field)].description)
        raise make_field_error(shown, must) from error
    parsed._given = body
    return parsed

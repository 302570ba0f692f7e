"""Fields of JSON that others write, and the refusal of what they cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class RefusedError(Exception):
    """A request that is answered by an error in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> Mapping[str, Any]:
        """What the program gets."""
        kinds = {401: "authentication_error", 403: "permission_error"}
        kinds |= {404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def json_object(raw: bytes) -> dict[str, Any]:
    """The body of a request.

    Raises:
        RefusedError: if it is none.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body of the request is no valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError(400, "The body of the request must be a JSON object.")
    if b"\\ud" in raw.lower():  # halves of characters may be written so, and no tokenizer takes one
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RefusedError(
                400,
                f"The body of the request is no valid text: {error.reason} (half of an emoji?).",
            ) from error
    return body


def read(
    body: Mapping[str, Any],
    name: str,
    kind: type,
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field that may be missing or null.

    Raises:
        RefusedError: if it is of another kind, or out of its range.
    """
    value = body.get(name)
    if value is None:
        return default
    fits = is_number(value) if kind is float else isinstance(value, kind)
    if not fits or (kind is int and isinstance(value, bool)):
        raise wrong(name, f"must be {_WORDS[kind]}")
    if least is not None and value < least:
        raise wrong(name, f"must be {least} or more")
    if most is not None and value > most:
        raise wrong(name, f"must be at most {most}")
    return value


def wrong(name: str, what: str) -> RefusedError:
    """A refusal of a field."""
    return RefusedError(400, f"`{name}` {what}.", param=name)


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def is_token(value: Any) -> bool:
    """Whether it may be a token id."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def are_tokens(value: Any) -> bool:
    """Whether it may be a list of token ids."""
    return isinstance(value, list) and all(map(is_token, value))

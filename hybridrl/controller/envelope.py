"""Small messages as bytes: Ray's pickler takes any object, at a third of a millisecond each."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

from hybridrl.controller.host import Call, Reply

Message = TypeVar("Message", Call, Reply)


def seal(message: Message) -> Message | bytes:
    """The message as bytes, if it holds plain values only: neither references, which Ray has to
    count, nor objects of classes that the other side might not be able to import."""
    content = (message.arguments, message.keywords) if isinstance(message, Call) else message.value
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL) if _is_plain(content) else message


def unseal(message: Any) -> Any:
    """What was sealed; anything else as it is."""
    return pickle.loads(message) if type(message) is bytes else message


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (tuple, list):
        return all(map(_is_plain, value))
    return kind in (type(None), bool, int, float, str)

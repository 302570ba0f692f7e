"""Replies as bytes: Ray's pickler takes any object, at a third of a millisecond each."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hybridrl.controller.host import Reply


def seal(reply: Reply) -> Reply | bytes:
    """The reply as bytes, if its value is plain: neither references, which Ray has to count, nor
    objects of classes that the other side might not be able to import."""
    return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL) if is_plain(reply.value) else reply


def seal_all(replies: Sequence[Reply]) -> list[Reply] | bytes:
    """As `seal`, for the replies of all ranks at once."""
    plain = all(is_plain(reply.value) for reply in replies)
    return pickle.dumps(list(replies), pickle.HIGHEST_PROTOCOL) if plain else list(replies)


def unseal(message: Any) -> Any:
    """What was sealed; anything else as it is."""
    return pickle.loads(message) if type(message) is bytes else message


def is_plain(value: Any) -> bool:
    """Whether it is built of Python's own values only."""
    kind = type(value)
    if kind is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    if kind in (tuple, list):
        return all(map(is_plain, value))
    return kind in (type(None), bool, int, float, str)

"""Serialization of what travels between driver and hosts: requests, and replies that are plain.

Ray's own pickler takes any object, at a third of a millisecond each; it also counts references, so
that the references in a request are set apart from it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.controller.group_call import CallRequest, CallResult, InvokeRequest, ShardedResult
from hybridrl.ray_backend.ray_import import CloudPickler


class _RequestPickler(CloudPickler):
    """A pickler that writes a number in place of each result."""

    def __init__(self, file: io.BytesIO) -> None:
        begin: Any = super().__init__  # which has no annotations
        begin(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers: dict[CallResult, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, CallResult):
            number = self.numbers.setdefault(value, len(self.numbers))
            return number, value.columns, value.rows
        return None


class _RequestUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, result: Callable[..., ShardedResult]) -> None:
        super().__init__(file)
        self._result = result

    def persistent_load(self, identity: Any) -> ShardedResult:
        return self._result(*identity)


def serialize_request(request: CallRequest) -> tuple[bytes, list[CallResult]]:
    """Serialize a request, with classes and functions of the driver's script by value, and return
    it with the results of other calls in it."""
    if isinstance(request, InvokeRequest) and _is_plain((request.arguments, request.keywords)):
        return pickle.dumps(request, pickle.HIGHEST_PROTOCOL), []  # a tenth of the time
    file = io.BytesIO()
    packer: Any = _RequestPickler(file)
    packer.dump(request)
    return file.getvalue(), list(packer.numbers)


def join_header(head: Any, body: bytes) -> bytes:
    """Return a message of two parts: the header for one receiver, then the body for all."""
    return pickle.dumps(head, pickle.HIGHEST_PROTOCOL) + body


def split_header(message: bytes) -> tuple[Any, bytes]:
    """Split a message into its header, and its body as it is."""
    file = io.BytesIO(message)
    head = pickle.load(file)
    return head, message[file.tell() :]


def deserialize_request(body: bytes, result: Callable[..., ShardedResult]) -> CallRequest:
    """Deserialize a request; `result` builds the stand-in for another call's result from its number
    in the request, its columns and its rows."""
    request: CallRequest = _RequestUnpickler(io.BytesIO(body), result).load()
    return request


def serialize_reply(content: Any, values: Sequence[Any]) -> Any:
    """Serialize replies if their values are plain: neither references, which Ray has to count, nor
    objects of classes that the receiver might not be able to import."""
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL) if _is_plain(values) else content


def deserialize_reply(message: Any) -> Any:
    """Deserialize what `serialize_reply` has serialized; return anything else as it is."""
    return pickle.loads(message) if type(message) is bytes else message


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of Python's own types only."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind in (tuple, list):
        return all(map(_is_plain, value))
    return kind in (type(None), bool, int, float, str)

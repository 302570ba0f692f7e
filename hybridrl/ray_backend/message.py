"""Calls as bytes, with the references in them set apart: who passes a call on need not open it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from hybridrl.controller.envelope import is_plain
from hybridrl.controller.host import Call
from hybridrl.ray_backend.library import ray


class _Packer(ray.cloudpickle.Pickler):
    """Writes a number in the place of each reference."""

    def __init__(self, file: io.BytesIO, kinds: tuple[type, ...]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._kinds = kinds
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, self._kinds):
            return self._numbers.setdefault(value, len(self._numbers))
        return None

    def references(self) -> list[Any]:
        return list(self._numbers)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: Sequence[Any]) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, number: int) -> Any:
        return self._references[number]


def pack(content: Any, kinds: tuple[type, ...]) -> tuple[bytes, list[Any]]:
    """An object as bytes, classes and functions of the driver's script by value; and the references
    in it, which are the instances of `kinds`."""
    if isinstance(content, Call) and is_plain((content.arguments, content.keywords)):
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL), []  # a tenth of the time
    file = io.BytesIO()
    packer = _Packer(file, kinds)
    packer.dump(content)
    return file.getvalue(), packer.references()


def addressed(head: Any, body: bytes) -> bytes:
    """A message of two parts: what is for one receiver, before what is for all."""
    return pickle.dumps(head, pickle.HIGHEST_PROTOCOL) + body


def open_head(message: bytes) -> tuple[Any, bytes]:
    """The head, and the body as it is."""
    file = io.BytesIO(message)
    head = pickle.load(file)
    return head, message[file.tell() :]


def unpack(message: bytes, references: Sequence[Any]) -> tuple[Any, Any]:
    """Head and content, with these references in their places."""
    file = io.BytesIO(message)
    head = pickle.load(file)
    return head, _Unpacker(file, references).load()

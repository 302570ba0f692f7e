"""Messages between the pool and its children: pickles, each after its length in eight bytes."""

from __future__ import annotations

import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def pack(message: Any) -> bytes:
    """The bytes of one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Puts messages together from bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """Takes the next piece and returns the messages that it completes."""
        self._buffer += piece
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages

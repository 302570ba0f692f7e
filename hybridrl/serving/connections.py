"""Connections to an endpoint: few without a token, for a short time, and not too many in all."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from aiohttp import web

MOST_UNKNOWN = 128
"""Connections that have not shown a token, or half of all if that is less; one more ends the oldest
of them."""
HEAD_S = 10
"""Seconds in which a connection has to show one."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nRetry-After: 5\r\n"
    b"Connection: close\r\n\r\nThe endpoint has as many connections as it takes: half of what "
    b"`ulimit -n` of the job allows.\n"
)


def most_open() -> int:
    """Connections that leave the job as many descriptors as they take themselves."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


class Connections:
    """The open connections of an endpoint, used in its loop.

    Args:
        most: Most connections at a time; further ones are refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Any] = set()
        self._unknown: dict[Any, int] = {}  # and for how many seconds, the oldest first

    def add(self, transport: Any) -> None:
        """Add a new connection, which has not shown a token; end the oldest such if there are too
        many."""
        if len(self._unknown) >= min(MOST_UNKNOWN, max(1, self._most // 2)):
            self._end(next(iter(self._unknown)))
        self._open.add(transport)
        self._unknown[transport] = 0
        if len(self._open) > self._most:
            transport.write(FULL)
            transport.close()

    def know(self, transport: Any) -> None:
        """Note that a connection has shown a token."""
        self._unknown.pop(transport, None)

    def remove(self, transport: Any) -> None:
        """Remove a connection that is closed."""
        self._open.discard(transport)
        self._unknown.pop(transport, None)

    async def sweep(self) -> None:
        """End connections that do not show a token in time. Time in which the loop stood still is
        not counted: what they had sent may not have been read."""
        while True:
            await asyncio.sleep(1.0)
            for transport in list(self._unknown):
                self._unknown[transport] += 1
                if self._unknown[transport] > HEAD_S:
                    self._end(transport)

    def _end(self, transport: Any) -> None:
        self.remove(transport)
        transport.abort()


class Connection(web.RequestHandler):
    """A connection that enters itself in `Connections` as long as it is open."""

    __slots__ = ("_connections", "_own")

    def __init__(self, connections: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._own = transport
        self._connections.add(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self._own)
        super().connection_lost(exc)

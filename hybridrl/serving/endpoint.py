"""Endpoint: a server of one replica, in a thread of its own, for whoever has a token of it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_session import ANY, ROWS, AgentSession, SessionRegistry
from hybridrl.serving.outside import ExternalPrograms
from hybridrl.serving.request_exchange import RequestExchange
from hybridrl.serving.request_parsing import ApiError
from hybridrl.serving.routes import PERMISSION, EndpointRoutes, ServedModel
from hybridrl.system.locations import writing_beside

_log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 20
MAX_WAITING_REQUESTS = 4096
"""Requests that may wait for a generation at a time."""
GENERATION_TIMEOUT_S = 300.0
"""Seconds that a request waits for a generation to begin."""
_CLIENT_CLOSED_STATUS = 499
SHUTDOWN_TIMEOUT_S = 0.2
"""Seconds for requests that are under way when the endpoint closes."""
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


RouteHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ReplicaEndpoint:
    """An HTTP server that listens from its construction on; requests wait in `exchange` for the
    engine's thread.

    Args:
        host, port: Where it listens; port 0: any that is free.
        outside: Gives episodes to programs that ask for them; None: nothing does.
        patience_s: Seconds that requests wait while no generation is under way.
        most_bytes: Largest request.

    Attributes:
        sessions: Those that requests may name.
        url: Its address, without a path.
        token: Of the job, as `Authorization: Bearer <token>`: takes rows to play. Sessions have
            tokens of their own.

    Raises:
        ConfigError: if it cannot listen there.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        outside: ExternalPrograms | None = None,
        patience_s: float = GENERATION_TIMEOUT_S,
        most_bytes: int = MAX_REQUEST_BYTES,
    ) -> None:
        self.model = model
        self.exchange = RequestExchange(MAX_WAITING_REQUESTS)
        self.sessions = SessionRegistry(model.context_length)
        self.token = self.sessions.token(ROWS, ANY)
        # The job needs as many descriptors itself.
        self._connections = Connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._routes = EndpointRoutes(model, self.sessions, self.exchange, outside, patience_s)
        self._most_bytes = most_bytes
        self._address: tuple[str, int] | OSError = (host, port)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        self._ready.wait()
        if isinstance(self._address, OSError):
            raise ConfigError(
                f"The endpoint cannot listen at rollout.serve_host={host}, port {port} "
                f"(rollout.serve_port and those after it, one for each replica): {self._address}. "
                "Choose others; port 0 takes any that is free."
            )
        shown = f"[{self._address[0]}]" if ":" in self._address[0] else self._address[0]
        self.url = f"http://{shown}:{self._address[1]}"

    def close_session(self, session: AgentSession) -> None:
        """Close a session; pending requests of it are rejected."""
        self.sessions.close(session.name)
        if under_way := list(session.under_way):
            self.exchange.refuse(under_way, f"The session `{session.name}` is over.")

    def session_url(self, session: AgentSession) -> str:
        """Return the base URL of OpenAI's API for a session."""
        return f"{self.url}/session/{session.name}/v1"

    def announce(self, path: Path) -> None:
        """Write URL and token to a file that only this user can read."""
        content = {"url": self.url, "token": self.token, "model": self.model.name}
        with writing_beside(path) as new:
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)

    def close(self) -> None:
        """Stop listening and drop pending requests."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_tell_full)
        app = web.Application(
            client_max_size=self._most_bytes, middlewares=[_convert_errors, self._check_token]
        )
        self._routes.add_to(app)
        # What is no HTTP is answered by a 400. Failures here are told by `_convert_errors`.
        quiet = logging.getLogger(f"{__name__}.http")
        quiet.setLevel(logging.CRITICAL)
        # A program that goes away ends what it asked for.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            logger=quiet,
        )
        try:
            self._loop.run_until_complete(self._listen(runner, quiet))
        except OSError as error:
            self._address = error
        self._ready.set()
        if not isinstance(self._address, OSError):
            sweeping = self._loop.create_task(self._connections.sweep())
            self._loop.run_forever()
            sweeping.cancel()
            self._server.close()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _listen(self, runner: web.AppRunner, quiet: logging.Logger) -> None:
        assert not isinstance(self._address, OSError)
        await runner.setup()
        assert runner.server is not None
        options = {"loop": self._loop, "access_log": None, "logger": quiet}
        connect = partial(Connection, self._connections, runner.server, **options)
        self._server = await self._loop.create_server(connect, *self._address, backlog=1024)
        self._address = self._server.sockets[0].getsockname()[:2]

    @web.middleware
    async def _check_token(self, request: web.Request, handler: RouteHandler) -> web.StreamResponse:
        if request.path != "/health":
            kind, _, token = request.headers.get("Authorization", "").partition(" ")
            permission = self.sessions.permission(token.strip())
            if kind.lower() != "bearer" or permission is None:
                raise ApiError(
                    401,
                    "The endpoint wants `Authorization: Bearer <token>`, with the token of a "
                    "session or of this job: `api_key` of OpenAI's clients.",
                    code="invalid_api_key",
                )
            request[PERMISSION] = permission
            self._connections.know(request.transport)
        return await handler(request)


@web.middleware
async def _convert_errors(request: web.Request, handler: RouteHandler) -> web.StreamResponse:
    """Convert errors into replies in OpenAI's format."""
    try:
        return await handler(request)
    except ApiError as error:
        refused = error
    except web.HTTPRequestEntityTooLarge:
        refused = ApiError(413, "The request is too large.", code="request_too_large")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"{request.method} {request.path}"
        said = f"{what}: {error.reason}. docs/endpoint.md has the routes."
        refused = ApiError(error.status, said, code="unknown_url")
    except asyncio.CancelledError:
        raise
    except ConnectionError:  # nobody is there to read an answer
        return web.Response(status=_CLIENT_CLOSED_STATUS)
    except Exception:
        _log.exception("The endpoint failed to answer %s %s.", request.method, request.path)
        refused = ApiError(500, "The endpoint failed; its log says why.")
    headers = {"Retry-After": "5"} if refused.status in (429, 503) else None
    response = web.json_response(refused.body, status=refused.status, headers=headers)
    if refused.status == 401:
        response.force_close()
    return response


def _tell_full(loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
    """Says why no connection is accepted where this process has no descriptor left for one; the
    loop tries again every second."""
    error = told.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        _log.warning(
            "The endpoint takes no connections now: %s. Raise `ulimit -n` of the job.", error
        )
    else:
        loop.default_exception_handler(told)


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

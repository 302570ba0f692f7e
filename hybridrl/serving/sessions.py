"""Sessions: the episodes that are open at an endpoint, by name, and who may do what in them."""

from __future__ import annotations

import hmac
import secrets
import threading
from typing import NamedTuple

from hybridrl.rollout.engine_requests import Sampling
from hybridrl.serving.agent_session import Session

OWN = "own"
"""The name of a session that a request gets which names none."""
SAMPLE, REPORT, ROWS = "sample", "report", "rows"
"""What a token is for: turns of the model, what an episode was worth, rows to play."""
ANY = "any"
"""In place of a session's name: the token is for all of them."""


class Permission(NamedTuple):
    """What a token allows: `SAMPLE`, `REPORT` or `ROWS`, and in which session."""

    scope: str
    session: str

    def __str__(self) -> str:
        if self.scope == ROWS:
            return "is the job's, which takes rows from /episodes/next and opens no session"
        verb = "sampling" if self.scope == SAMPLE else "reporting"
        return f"is for {verb} in {f'`{self.session}`' if self.session != ANY else 'any session'}"


class Sessions:
    """Of the endpoint's thread and the engine's."""

    def __init__(self, context_length: int) -> None:
        self._free = Sampling(context_length)
        self._open: dict[str, Session] = {}
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)

    def open(self, name: str, sampling: Sampling, seed: int) -> Session:
        """An episode begins. The name has no dot."""
        session = Session(name, sampling, seed)
        with self._lock:
            self._open[name] = session
        return session

    def close(self, name: str) -> Session | None:
        """It is over: its name is unknown from now on."""
        with self._lock:
            return self._open.pop(name, None)

    def find(self, part: str) -> Session | None:
        """The episode of this name, or to which a part of this name belongs."""
        with self._lock:
            return self._open.get(part.partition(".")[0])

    def token(self, scope: str, session: str) -> str:
        """The token of a scope in a session. It is recomputed, not kept, so that it is recognised
        when the session is over."""
        head = f"{scope}-{session}"
        return f"{head}-{hmac.digest(self._key, head.encode(), 'sha256').hex()}"

    def permission(self, token: str) -> Permission | None:
        """What a token allows; None: it is none of this endpoint."""
        scope, _, rest = token.partition("-")
        found = Permission(scope, rest.rpartition("-")[0])
        is_known = token.isascii() and hmac.compare_digest(token, self.token(*found))
        return found if is_known else None

    def untrained(self, seed: int | None) -> Session:
        """For a request that names no session: nothing is learned from what is sampled in it."""
        seed = secrets.randbits(62) if seed is None else seed
        return Session(OWN, self._free, seed, is_trained=False)

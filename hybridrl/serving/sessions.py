"""Sessions: the episodes that are open at an endpoint, by name."""

from __future__ import annotations

import secrets
import threading

from hybridrl.rollout.base import Sampling
from hybridrl.serving.session import Session

OWN = "own"
"""The name of a session that a request gets which names none."""


class Sessions:
    """Of the endpoint's thread and the engine's."""

    def __init__(self, context_length: int) -> None:
        self._free = Sampling(context_length)
        self._open: dict[str, Session] = {}
        self._lock = threading.Lock()

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

    def untrained(self, seed: int | None) -> Session:
        """For a request that names no session: nothing is learned from what is sampled in it."""
        seed = secrets.randbits(62) if seed is None else seed
        return Session(OWN, self._free, seed, is_trained=False)

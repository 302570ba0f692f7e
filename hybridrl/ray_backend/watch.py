"""Waiting for calls, and noticing when one of them fails or its host dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybridrl.controller.envelope import unseal
from hybridrl.controller.failures import Death
from hybridrl.controller.host import Failure, Reply
from hybridrl.core.record import Record
from hybridrl.ray_backend.library import ray

ROOT_CAUSE_SECONDS = 1.0
"""After a failure, how long to listen for an earlier one or a death that may be its cause."""
LOOK_SECONDS = 1.0
"""How soon a failure of another call than those waited for is seen."""


class CallsFailedError(Exception):
    """Some calls failed, or their hosts died: all that was found within a moment."""

    def __init__(self, found: Sequence[Failure | Death]) -> None:
        super().__init__(found)
        self.found = list(found)


class Due(NamedTuple):
    """A host's part of a call that was not waited for: where it runs, since when (seconds of the
    monotonic clock), and its chapter."""

    host: int
    name: str
    since: float
    chapter: int


class Watch:
    """The calls under way, a reply from each host.

    Args:
        note: Is told of each call that was done, with its chapter.
    """

    def __init__(self, note: Callable[[int, Record], None]) -> None:
        self._note = note
        self._due: dict[Any, Due] = {}

    def add(self, reply: Any, host: int, name: str, chapter: int) -> None:
        self._due[reply] = Due(host, name, time.monotonic(), chapter)

    def is_due(self, reply: Any) -> bool:
        return reply in self._due

    def due(self) -> dict[Any, Due]:
        """What is not known to be done, by reply, the oldest first."""
        return dict(self._due)

    def wait(self, replies: Sequence[Any], seconds: float) -> list[Reply] | None:
        """The replies, or None if some are late.

        Raises:
            CallsFailedError: if a call failed or a host died, among all that are due.
        """
        until = time.monotonic() + seconds
        late = {reply for reply in replies if reply in self._due}
        while late:
            # All at once, because each question costs; a failure among them is seen in a second.
            left = max(0.0, until - time.monotonic())
            try:
                found = _open(replies, min(LOOK_SECONDS, left))
            except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError):
                pass  # some are late or lost: look at each
            else:
                self._take(replies, found)
                return found
            due = list(self._due)
            ready, _ = ray.wait(due, num_returns=len(due), timeout=0)
            self._settle(ready)
            late.difference_update(ready)
            if late and time.monotonic() >= until:
                return None
        return _open(replies)

    def _settle(self, finished: Sequence[Any]) -> None:
        """Takes finished calls off the list; raises if one of them failed."""
        death = None
        try:
            replies = _open(finished)
        except ray.exceptions.RayError:
            replies = []
            for reference in finished:
                try:
                    replies += _open([reference])
                except ray.exceptions.RayError as error:
                    death = _death(self._due[reference], error)
        if death is not None:  # outside the handler, so that Ray's own traceback is not chained
            self._fail(death)
        self._take(finished, replies)

    def _take(self, finished: Sequence[Any], replies: Sequence[Reply]) -> None:
        for reference, reply in zip(finished, replies, strict=True):
            if reply.failure is not None and reference in self._due:
                self._fail(reply.failure)
            if (call := self._due.pop(reference, None)) is not None:  # not taken before
                self._note(call.chapter, reply.record)

    def _fail(self, first: Failure | Death) -> None:
        """Raises what is known of a failure. A rank that dies makes its peers fail in their
        collectives: listens a moment for all of them."""
        found = [first]
        until = time.monotonic() + ROOT_CAUSE_SECONDS
        due = self.due()
        waiting = list(due)
        while waiting and (left := until - time.monotonic()) > 0:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            for reference in ready:
                try:
                    (reply,) = _open([reference])
                except ray.exceptions.RayError as error:
                    found.append(_death(due[reference], error))
                else:
                    found.extend([reply.failure] if reply.failure else [])
        raise CallsFailedError(found)


def _death(call: Due, error: Exception) -> Death:
    refused = isinstance(error, ray.exceptions.RayTaskError)
    return Death(call.host, call.name, str(error), refused)


def _open(replies: Sequence[Any], timeout: float | None = None) -> list[Reply]:
    return [unseal(reply) for reply in ray.get(list(replies), timeout=timeout)]

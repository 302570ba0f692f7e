"""The exchange of requests and replies between the endpoint's asyncio loop and the engine's thread.

Programs' requests live in the endpoint's asyncio loop, the engine in a thread that polls it. What
one thread wants of the other is left here, so that neither waits for the other.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from hybridrl.errors import HybridRLError
from hybridrl.rollout.rollout_engine import EngineOutput, Request, SamplingSettings


class UnansweredRequestError(HybridRLError):
    """A request that will not be answered; the message is the reason."""


class PendingReply:
    """The pending reply to one request. Only the loop's thread uses it, except for `is_taken` and
    `token_ids`.

    Attributes:
        request: As it goes to the engine.
        is_taken: Whether a generation has it; if not, it waits for one.
        outcome: A future of the turn.
        changed: The event of a stream, set when there are more tokens and when there is an outcome;
            None: nobody wants to see tokens as they come.
        token_ids: With a stream, the tokens so far.
    """

    def __init__(self, request: Request, changed: asyncio.Event | None) -> None:
        self.request = request
        self.is_taken = False
        self.outcome: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        self.changed = changed
        self.token_ids: list[int] = []
        if changed is not None:
            self.outcome.add_done_callback(lambda _: changed.set())


class RequestExchange:
    """A thread-safe exchange between the endpoint's loop and the engine's thread.

    Args:
        most_waiting: Requests that may wait for a generation at a time.

    Attributes:
        is_attended: Whether a generation is under way.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._is_woken = False
        self._keys = itertools.count()
        self._new: list[PendingReply] = []
        self._dropped: list[int] = []
        self._replies: dict[int, PendingReply] = {}
        self.is_attended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # The loop's side.

    def ask(
        self,
        prompt_ids: list[int],
        sampling: SamplingSettings,
        seed: int,
        changed: asyncio.Event | None,
    ) -> PendingReply | None:
        """Submit a request to the engine; return None if too many are waiting."""
        self._loop = asyncio.get_running_loop()
        with self._changed:
            if len(self._new) >= self._most_waiting:
                return None
            reply = PendingReply(Request(next(self._keys), prompt_ids, sampling, seed), changed)
            self._replies[reply.request.key] = reply
            self._new.append(reply)
            self._wake()
        return reply

    def drop(self, reply: PendingReply) -> None:
        """Drop a request whose reply nobody waits for any more."""
        with self._changed:
            if self._replies.pop(reply.request.key, None) is None:
                return
            if reply in self._new:
                self._new.remove(reply)
            else:
                self._dropped.append(reply.request.key)
                self._wake()

    # The side of the engine's thread.

    def requests(self) -> list[Request]:
        """Take the requests that came since the last call, in order."""
        with self._changed:
            taken, self._new = self._new, []
            self.is_attended = True
            for reply in taken:
                reply.is_taken = True
        return [reply.request for reply in taken]

    def dropped(self) -> list[int]:
        """Take the keys of requests that the engine has and nobody waits for any more."""
        with self._changed:
            dropped, self._dropped = self._dropped, []
        return dropped

    def answer(self, turns: Mapping[int, EngineOutput]) -> None:
        """Deliver sampled turns, by key, to the requests that wait for them."""
        with self._changed:
            found = [(self._replies.pop(key, None), turn) for key, turn in turns.items()]
        self._tell([(reply, turn) for reply, turn in found if reply is not None])

    def grow(self, tokens: Mapping[int, list[int]]) -> None:
        """Deliver the tokens so far to requests that stream."""
        with self._changed:
            found = [(self._replies.get(key), ids) for key, ids in tokens.items()]
        changed = []
        for reply, ids in found:
            if reply is not None and reply.changed and len(ids) > len(reply.token_ids):
                reply.token_ids = ids
                changed.append(reply.changed)
        if changed:
            self._call(_set_events, changed)

    @property
    def streams(self) -> bool:
        with self._changed:
            return any(reply.changed is not None for reply in self._replies.values())

    def put_back(self) -> None:
        """Requeue unanswered requests for the next generation, which starts them anew; streams
        cannot begin anew and are rejected."""
        with self._changed:
            self._new = list(self._replies.values())
            begun = [r.request.key for r in self._new if r.is_taken and r.changed is not None]
            for reply in self._new:
                reply.is_taken = False
            self._dropped.clear()
            self.is_attended = False
        self.refuse(begun, "The policy is updated. Ask again.")

    def refuse(self, keys: Iterable[int], why: str) -> None:
        """Reject requests, which will not be answered."""
        with self._changed:
            found = [self._replies.pop(key, None) for key in keys]
            self._dropped += [r.request.key for r in found if r is not None and r.is_taken]
            self._new = [reply for reply in self._new if reply.request.key in self._replies]
        self._tell([(reply, UnansweredRequestError(why)) for reply in found if reply is not None])

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for new requests, dropped ones, or `wake`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_woken, timeout_s)
            self._is_woken = False

    def gather(self, wanted: int, quiet_s: float, longest_s: float) -> None:
        """Wait for more requests as long as they arrive in quick succession.

        Args:
            wanted: Number of requests that is enough.
            quiet_s: Seconds without a request after which nobody else is about to ask.
            longest_s: Longest wait in all, in seconds.
        """
        until = time.monotonic() + longest_s
        with self._changed:
            while (count := len(self._new)) < wanted and (left := until - time.monotonic()) > 0:
                has_more = partial(self._has_more_than, count)
                if not self._changed.wait_for(has_more, min(quiet_s, left)):
                    return

    def _has_more_than(self, count: int) -> bool:
        return len(self._new) > count

    def wake(self) -> None:
        """End a `wait` in another thread."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._is_woken = True
        self._changed.notify_all()

    def _tell(self, outcomes: Sequence[tuple[PendingReply, EngineOutput | Exception]]) -> None:
        if outcomes:
            self._call(_set_outcomes, outcomes)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _set_events(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _set_outcomes(outcomes: Sequence[tuple[PendingReply, EngineOutput | Exception]]) -> None:
    for reply, outcome in outcomes:
        if reply.outcome.done():  # cancelled in the meantime
            continue
        if isinstance(outcome, Exception):
            reply.outcome.set_exception(outcome)
        else:
            reply.outcome.set_result(outcome)

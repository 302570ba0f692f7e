"""The samples that one HTTP request waits for, from its prompts to the sampled turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridrl.rollout.rollout_engine import EngineOutput, SamplingSettings
from hybridrl.serving.agent_session import AgentSession, RecordedTurn
from hybridrl.serving.request_exchange import (
    PendingReply,
    RequestExchange,
    UnansweredRequestError,
)
from hybridrl.serving.request_parsing import ApiError, GenerationOptions

MOST_OF_SESSION = 256
"""Requests that may be under way in a session, so that one does not take the room of all."""


class SessionPart(NamedTuple):
    """The session that a request belongs to, and the name its program gave it."""

    session: AgentSession
    part: str


def resolve_sampling(
    wishes: GenerationOptions, session: AgentSession, room: int, stop_token_ids: Sequence[int] = ()
) -> SamplingSettings:
    """Return the sampling parameters of a request: the episode's, shortened as the request says;
    untrained sessions may choose all of them.

    Args:
        room: Tokens left after the prompt.
        stop_token_ids: That end every turn of this kind.
    """
    own = session.sampling
    if not session.is_trained:
        temperature = own.temperature if wishes.temperature is None else wishes.temperature
        top_p = own.top_p if wishes.top_p is None else wishes.top_p
        top_k = own.top_k if wishes.top_k is None else max(0, wishes.top_k)
        own = replace(own, temperature=temperature, top_p=max(top_p, 1e-6), top_k=top_k)
    limit = min(room, own.max_tokens, wishes.longest or room)
    asked = (
        0 if session.is_trained else wishes.min_tokens
    )  # the trainer would not leave out the end
    least = max(asked, own.min_tokens - session.sampled)
    ends = dict.fromkeys((*own.stop_token_ids, *stop_token_ids, *wishes.stop_token_ids))
    return replace(
        own,
        max_tokens=limit,
        min_tokens=max(0, min(limit, least)),
        stop=tuple(dict.fromkeys((*own.stop, *wishes.stop))),
        stop_token_ids=tuple(ends),
    )


class PendingSamples:
    """A context manager for the samples of one request; leaving it drops those that are not done.

    Args:
        patience_s: Seconds to wait for a generation to begin.
        is_streamed: Whether the program wants to see tokens as they come.
    """

    def __init__(
        self,
        exchange: RequestExchange,
        place: SessionPart,
        patience_s: float,
        is_streamed: bool = False,
    ) -> None:
        self._exchange = exchange
        self._place = place
        self._patience_s = patience_s
        self._changed = asyncio.Event() if is_streamed else None
        self._recorded: list[RecordedTurn] = []
        self.replies: list[PendingReply] = []

    def __enter__(self) -> PendingSamples:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        session = self._place.session
        for reply in self.replies:
            self._exchange.drop(reply)
            session.under_way.discard(reply.request.key)
        if kind is not None:  # the program did not get its answer, so it will ask again, or not
            for recorded in reversed(self._recorded):
                session.take_back(recorded)

    def ask(self, prompt_ids: list[int], sampling: SamplingSettings, samples: int) -> None:
        """Submit a prompt to the engine.

        Raises:
            ApiError: if too many requests wait already.
        """
        session, part = self._place
        for _ in range(samples):
            seed, reply, who = session.next_seed(part), None, "Too many requests"
            if len(session.under_way) < MOST_OF_SESSION:
                reply = self._exchange.ask(prompt_ids, sampling, seed, self._changed)
            else:
                who = f"{MOST_OF_SESSION} requests of this session"
            if reply is None:
                said = f"{who} wait for the policy. Ask again later."
                raise ApiError(429, said, code="too_many_requests")
            self.replies.append(reply)
            session.under_way.add(reply.request.key)

    async def turns(self) -> list[EngineOutput]:
        """Wait for all submitted samples and return their turns.

        Raises:
            ApiError: if there will be no answer.
        """
        pending = {reply.outcome for reply in self.replies}
        while pending:
            _, pending = await asyncio.wait(pending, timeout=self._patience_s)
            self._check_patience()
        try:
            return [reply.outcome.result() for reply in self.replies]
        except UnansweredRequestError as error:
            raise ApiError(409, str(error), code="not_answered") from error

    async def grow(self) -> bool:
        """Wait until a streamed reply has more tokens; return False when all are complete.

        Raises:
            ApiError: if no generation begins.
        """
        assert self._changed is not None
        if all(reply.outcome.done() for reply in self.replies):
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), self._patience_s)
        except TimeoutError:
            self._check_patience()
        self._changed.clear()
        return True

    def _check_patience(self) -> None:
        if any(not (reply.outcome.done() or reply.is_taken) for reply in self.replies):
            raise ApiError(
                503,
                f"No generation was under way for {self._patience_s:g} s: the policy is being "
                "updated. Ask again later.",
                code="no_generation",
            )

    def record(self, turn: EngineOutput, key: str | None = None) -> None:
        """Record a turn that is about to be sent; it is discarded if the block ends with an error.

        Raises:
            ApiError: if the episode is over.
        """
        session, part = self._place
        recorded = session.record(part, turn, key)
        if recorded is not None:
            self._recorded.append(recorded)
        elif session.is_trained:
            raise ApiError(404, f"The session `{part}` is over.", code="session_not_found")

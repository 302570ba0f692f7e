"""Streamed replies, sent as server-sent events while the tokens arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from hybridrl.serving.agent_session import SampledTurn
from hybridrl.serving.messages import AssistantTurn
from hybridrl.serving.pending_samples import PendingSamples
from hybridrl.serving.reply_builders import ReplyBuilder, count_usage
from hybridrl.serving.request_exchange import PendingReply, TokenQueue
from hybridrl.serving.request_parsing import ApiError


class EventStream:
    """A stream of server-sent events to one client."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, body: Any) -> None:
        """Send one event; the first one also sends the headers."""
        text = body if isinstance(body, str) else json.dumps(body)
        await self._write(f"data: {text}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        """Send the `[DONE]` event and close the stream."""
        await self._write(b"data: [DONE]\n\n")
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def _write(self, data: bytes) -> None:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(self._request)
            self._response = response
        await self._response.write(data)


class ReplyStream:
    """The streamed replies to one request.

    Args:
        grown: Where `asking` leaves what its replies have so far.
    """

    def __init__(
        self, events: EventStream, asking: PendingSamples, grown: TokenQueue, shape: ReplyBuilder
    ) -> None:
        self._events, self._asking, self._grown, self._shape = events, asking, grown, shape
        self._told = [AssistantTurn("") for _ in asking.replies]

    async def follow(self, patience_s: float) -> None:
        """Send new text as it arrives, until every choice is complete.

        Raises:
            RefusedError: if no generation begins.
        """
        index_of = {id(reply): index for index, reply in enumerate(self._asking.replies)}
        left, getting = len(index_of), asyncio.ensure_future(self._grown.get())
        try:
            while left:
                await asyncio.wait({getting}, timeout=patience_s)
                if not getting.done():
                    self._asking.check_patience()
                    continue
                news = [getting.result()]
                while not self._grown.empty():  # of each only the newest counts
                    news.append(self._grown.get_nowait())
                getting = asyncio.ensure_future(self._grown.get())
                left -= sum(ids is None for _, ids in news)
                if self._shape.streams_text:
                    newest = {index_of[id(reply)]: (reply, ids) for reply, ids in news if ids}
                    for index, (reply, ids) in newest.items():
                        await self._tell(index, reply, ids)
        finally:
            getting.cancel()

    async def finish(
        self,
        ends: Sequence[tuple[SampledTurn, AssistantTurn, list[str]]],
        prompts: Sequence[list[int]],
    ) -> None:
        """Send the rest of each choice, its finish reason and its tokens.

        Args:
            ends: Of each answer: the turn, what it says, and the ids of its calls.
        """
        for index, (turn, said, ids) in enumerate(ends):
            if self._told[index] == AssistantTurn(""):
                await self._open(index)
            new = said.after(self._told[index])
            last = self._shape.last(index, turn, said, new, ids)
            await self._events.send(self._shape.event([last]))
        if self._shape.wishes.stream_options.include_usage:
            counted = count_usage([turn for turn, _, _ in ends], prompts)
            await self._events.send(self._shape.event([], usage=counted))

    async def _tell(self, index: int, reply: PendingReply, token_ids: list[int]) -> None:
        stops = self._shape.wishes.stop
        said = self._shape.said(token_ids, reply.request.prompt_ids).held_back(stops)
        new = said.after(self._told[index])
        if not new.content and not new.reasoning:
            return
        if self._told[index] == AssistantTurn(""):
            await self._open(index)
        self._told[index] = said
        await self._events.send(self._shape.event([self._shape.piece(index, new)]))

    async def _open(self, index: int) -> None:
        opening = self._shape.opening(index)
        if opening is not None:
            await self._events.send(self._shape.event([opening]))


async def send_stream_error(events: EventStream, error: ApiError) -> web.StreamResponse:
    """Send an error in the middle of a stream, and end it."""
    await events.send(error.body)
    return await events.end()

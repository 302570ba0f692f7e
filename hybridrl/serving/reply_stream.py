"""Streamed replies, sent as server-sent events while the tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from hybridrl.serving.messages import AssistantTurn
from hybridrl.serving.pending_samples import PendingSamples
from hybridrl.serving.reply_builders import ReplyBuilder, SampledChoice, count_usage
from hybridrl.serving.request_parsing import ApiError

_NOTHING = AssistantTurn("")


class ReplyStream:
    """The streamed replies to one request.

    Attributes:
        has_begun: Whether anything has been sent.
    """

    def __init__(self, request: web.Request, shape: ReplyBuilder) -> None:
        self.has_begun = False
        self._request, self._shape = request, shape
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        self._response = web.StreamResponse(headers=headers)
        self._read: dict[int, int] = {}  # by choice, tokens that were looked at
        self._told: dict[int, AssistantTurn] = {}

    async def follow(self, asking: PendingSamples) -> None:
        """Send new text as it arrives, until every choice is complete.

        Raises:
            ApiError: if no generation begins.
        """
        while await asking.grow():
            for index, reply in enumerate(asking.replies if self._shape.streams_text else ()):
                token_ids = reply.token_ids
                if len(token_ids) > self._read.get(index, 0):
                    self._read[index] = len(token_ids)
                    await self._tell(index, reply.request.prompt_ids, token_ids)

    async def finish(
        self, choices: Sequence[SampledChoice], prompts: Sequence[list[int]]
    ) -> web.StreamResponse:
        """Send the rest of each choice, its finish reason and its tokens, and end the stream."""
        for index, choice in enumerate(choices):
            await self._open(index)
            new = choice.said.after(self._told[index])
            await self._send(self._shape.event([self._shape.last(index, choice, new)]))
        if self._shape.wishes.stream_options.include_usage:
            await self._send(self._shape.event([], usage=count_usage(choices, prompts)))
        return await self._end()

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Send an error in the middle of the stream, and end it."""
        await self._send(error.body)
        return await self._end()

    async def _tell(self, index: int, prompt_ids: list[int], token_ids: list[int]) -> None:
        said = self._shape.said(token_ids, prompt_ids).held_back(self._shape.wishes.stop)
        new = said.after(self._told.get(index, _NOTHING))
        if new.content or new.reasoning:
            await self._open(index)
            self._told[index] = said
            await self._send(self._shape.event([self._shape.piece(index, new)]))

    async def _open(self, index: int) -> None:
        """Send the first chunk of a choice, unless it has been sent."""
        if index not in self._told:
            self._told[index] = _NOTHING
            if (opening := self._shape.opening(index)) is not None:
                await self._send(self._shape.event([opening]))

    async def _send(self, body: Any) -> None:
        """Send one event; the first one also sends the headers."""
        if not self.has_begun:
            await self._response.prepare(self._request)
            self.has_begun = True
        text = body if isinstance(body, str) else json.dumps(body)
        await self._response.write(f"data: {text}\n\n".encode())

    async def _end(self) -> web.StreamResponse:
        await self._send("[DONE]")
        await self._response.write_eof()
        return self._response

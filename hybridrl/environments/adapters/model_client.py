"""A small client of the model's endpoint for environments that bring none; standard library
only."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from .environment_adapter import MODEL_NAME, AdapterEpisode


class EndpointError(Exception):
    """An HTTP error of the model's endpoint.

    Attributes:
        status: Of HTTP.
        code: What the endpoint says, such as `context_length_exceeded`.
    """

    def __init__(self, status: int, body: str) -> None:
        try:
            error = json.loads(body)["error"]
            message, self.code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError):
            message, self.code = body[:500], None
        super().__init__(f"The model's endpoint answered with status {status}: {message}")
        self.status = status

    @property
    def is_too_long(self) -> bool:
        """Return whether the conversation exceeds the model's context length."""
        return self.status == 400 and self.code == "context_length_exceeded"


class _BaseModelClient:
    """The address and credentials of an episode's model."""

    def __init__(self, episode: AdapterEpisode) -> None:
        self.base_url = episode.url
        self.api_key = episode.token
        self.name = MODEL_NAME
        self.session = episode.session
        self.greedy = episode.greedy

    def _chat(self, messages: list[dict[str, Any]], further: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.name, "messages": messages, **further}


class AsyncModelClient(_BaseModelClient):
    """The model as `async def play(row, model)` gets it."""

    async def chat(self, messages: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """Return the model's reply to a conversation as a message (`role`, `content`, and
        `tool_calls` if any).

        Args:
            further: Fields of a chat completion request, such as `max_tokens`, `stop` and `tools`.

        Raises:
            EndpointError: if the endpoint refuses, for the conversation is too long, say.
        """
        answer = await self.request("/chat/completions", self._chat(messages, further))
        return dict(answer["choices"][0]["message"])

    async def reply(self, messages: list[dict[str, Any]], **further: Any) -> str | None:
        """Ask as `chat` does, append the reply to the messages and return its text; None if the
        conversation exceeds the context length."""
        try:
            answer = await self.chat(messages, **further)
        except EndpointError as error:
            if error.is_too_long:
                return None
            raise
        text = str(answer.get("content") or "")
        messages.append({"role": "assistant", "content": text})
        return text

    async def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a JSON body to a path below `base_url`."""
        return await post_json(f"{self.base_url}{path}", self.api_key, body, self.session)


class ModelClient(_BaseModelClient):
    """The model as a plain `def play(row, model)` gets it."""

    def chat(self, messages: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
        """Return the model's reply as `AsyncModelClient.chat` does, blocking until it arrives."""
        answer = self.request("/chat/completions", self._chat(messages, further))
        return dict(answer["choices"][0]["message"])

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        parts = urlsplit(f"{self.base_url}{path}")
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        try:
            content, headers = _encode_request(body, self.api_key, self.session)
            connection.request("POST", parts.path, content, headers)
            response = connection.getresponse()
            return _parse_reply(response.status, response.read())
        finally:
            connection.close()


async def post_json(
    url: str, token: str, body: dict[str, Any], session: str = ""
) -> dict[str, Any]:
    """Post a JSON body to an `http://` address and return the JSON reply.

    Raises:
        EndpointError: if the status is not 200.
    """
    parts = urlsplit(url)
    content, headers = _encode_request(body, token, session)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        lines = [f"POST {parts.path} HTTP/1.0", f"Host: {parts.netloc}"]  # so nothing is chunked
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {len(content)}", "", ""]
        writer.write("\r\n".join(lines).encode() + content)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError(f"{url} closed the connection.")
    return _parse_reply(int(head.split(None, 2)[1]), text)


def _encode_request(body: dict[str, Any], token: str, session: str) -> tuple[bytes, dict[str, str]]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return json.dumps(body).encode(), headers | ({"X-Session-ID": session} if session else {})


def _parse_reply(status: int, text: bytes) -> dict[str, Any]:
    if status != 200:
        raise EndpointError(status, text.decode("utf-8", "replace"))
    return dict(json.loads(text))

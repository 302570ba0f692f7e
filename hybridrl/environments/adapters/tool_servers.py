"""Tools of MCP servers, described and called in the format of OpenAI's API."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any


class ToolServers:
    """Connections to MCP servers, as an asynchronous context manager.

    Args:
        servers: By name: `url`, or `command` (a list), with `env` and `cwd` if wanted.

    Attributes:
        described: The tools, as a chat completion request lists them. Where two servers have tools
            of one name, the later one's begins with the server's name.
        turns, calls: Numbers of the model's messages in `converse`, and of its tool calls.
    """

    def __init__(self, servers: dict[str, dict[str, Any]]) -> None:
        self._servers = servers
        self._stack = contextlib.AsyncExitStack()
        self._tools: dict[str, tuple[Any, str]] = {}
        self.described: list[dict[str, Any]] = []
        self.turns = self.calls = 0

    async def __aenter__(self) -> ToolServers:
        try:
            for name, server in self._servers.items():
                await self._connect(name, server)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _connect(self, name: str, server: dict[str, Any]) -> None:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        if "url" in server:
            from mcp.client import streamable_http

            is_mcp_1 = not hasattr(streamable_http, "streamable_http_client")
            client = "streamablehttp_client" if is_mcp_1 else "streamable_http_client"
            connect = getattr(streamable_http, client)
            streams = await self._stack.enter_async_context(connect(server["url"]))
        else:
            program, *arguments = server["command"]
            wanted = {"command": program, "args": arguments}
            wanted |= {key: server[key] for key in ("env", "cwd") if key in server}
            streams = await self._stack.enter_async_context(
                stdio_client(StdioServerParameters(**wanted))
            )
        session = await self._stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        for tool in (await session.list_tools()).tools:
            shown = f"{name}_{tool.name}" if tool.name in self._tools else tool.name
            self._tools[shown] = session, tool.name
            schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
            function = {
                "name": shown,
                "description": tool.description or "",
                "parameters": schema or {"type": "object", "properties": {}},
            }
            self.described.append({"type": "function", "function": function})

    async def converse(
        self,
        ask: Callable[..., Awaitable[dict[str, Any]]],
        messages: list[dict[str, Any]],
        max_turns: float = math.inf,
    ) -> None:
        """Ask the model and call the tools that it wants until it wants none; `messages` grows by
        all that is said.

        Args:
            ask: Called with `messages`, and with `tools` if there are any; returns the model's
                message.
        """
        described = {"tools": self.described} if self.described else {}
        while self.turns < max_turns:
            message = await ask(messages=messages, **described)
            self.turns += 1
            messages.append(message)
            if not (wanted := message.get("tool_calls") or []):
                return
            self.calls += len(wanted)
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.get("id", ""),
                    "content": await self._answer(call),
                }
                for call in wanted
            ]

    async def _answer(self, call: dict[str, Any]) -> str:
        """Return the result of a tool call of the model as text, or its error."""
        name, given = call["function"]["name"], call["function"].get("arguments") or "{}"
        if name not in self._tools:
            return f"Error: there is no tool `{name}`; there is {', '.join(self._tools) or 'none'}."
        try:
            arguments = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            return f"Error: the arguments are no JSON: {error}"
        if not isinstance(arguments, dict):
            return "Error: the arguments must be a JSON object."
        session, tool = self._tools[name]
        try:
            result = await session.call_tool(tool, arguments)
        except Exception as error:
            return f"Error: {error}"
        return "\n".join(part.text for part in result.content if getattr(part, "text", None))

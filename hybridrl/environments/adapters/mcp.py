"""The adapter `mcp`: a conversation with tools of MCP servers, scored at its end by the job's
reward functions."""

from __future__ import annotations

from functools import partial
from typing import Any

from .environment_adapter import (
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeError,
    EpisodeReturn,
    EpisodeScore,
)
from .model_client import AsyncModelClient, EndpointError
from .tool_servers import ToolServers


class Adapter(EnvironmentAdapter):
    """An adapter for conversations with tools of MCP servers. Options:

    * `servers`: by name, `{command: [python, server.py]}` or `{url: http://...}`;
    * `column`: of the rows: the names of the servers that a row has, a list or a text with commas
      between them; without it, all of them;
    * `system`: a message before the prompt; `max_turns`: most turns of the model;
    * `request`: further fields of each request, such as `max_tokens`.

    A row's `prompt` is a text, or a list of messages in the column `messages`.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        self._own = self.take(
            {"servers": {}, "column": None, "system": None, "max_turns": 16, "request": {}}
        )
        if not self._own["servers"] or not isinstance(self._own["servers"], dict):
            raise EnvironmentSetupError(
                "environment.name=mcp needs environment.options.servers, such as "
                "{files: {command: [python, server.py]}}."
            )
        for server, how in self._own["servers"].items():
            if not isinstance(how, dict) or len({"command", "url"} & set(how)) != 1:
                raise EnvironmentSetupError(
                    f"environment.options.servers.{server}={how}: must have a `command`, which is "
                    "a list, or a `url`."
                )

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        own, model, row = self._own, AsyncModelClient(episode), episode.row
        messages = list(row.get("messages") or [{"role": "user", "content": str(row["prompt"])}])
        if own["system"]:
            messages.insert(0, {"role": "system", "content": own["system"]})
        ask = partial(model.chat, **own["request"])
        async with ToolServers(self._servers_of(row)) as tools:
            try:
                await tools.converse(ask, messages, own["max_turns"])
            except EndpointError as error:
                if not error.is_too_long:
                    raise
        metrics = {"turns": float(tools.turns), "tool_calls": float(tools.calls)}
        return EpisodeScore(0.0, None, metrics)

    def _servers_of(self, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
        servers, column = self._own["servers"], self._own["column"]
        if column is None:
            return dict(servers)
        wanted = row.get(column) or []
        if isinstance(wanted, str):
            wanted = [name.strip() for name in wanted.split(",") if name.strip()]
        for name in wanted:
            if name not in servers:
                raise EpisodeError(
                    f"The row's column `{column}` names the server `{name}`, but "
                    f"environment.options.servers has {', '.join(servers)}."
                )
        return {name: servers[name] for name in wanted}

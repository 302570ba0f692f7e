"""The adapter `openenv`: environments on a server that speaks OpenEnv's WebSocket protocol."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .environment_adapter import (
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeError,
    EpisodeReturn,
    EpisodeScore,
)
from .model_client import AsyncModelClient


class Adapter(EnvironmentAdapter):
    """An adapter for environments on an OpenEnv server. Options:

    * `url`: of the server, `http://host:port`, or a list of them, which share the episodes;
    * `action`: the field of an action that takes the model's text; by default the only one that the
      server requires. An answer that is a JSON object is the action itself;
    * `observation`: the field of an observation that the model reads; by default all, as JSON;
    * `system`: a message before the first observation; `max_turns`: most turns of the model;
    * `request`: further fields of each request, such as `max_tokens`.

    The column `reset` of a row, a dictionary, goes to `reset`; without one its `seed` does.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        known = {"url": None, "action": None, "observation": None, "system": None}
        own = self.take({**known, "max_turns": 50, "request": {}})
        urls = own["url"] if isinstance(own["url"], list) else [own["url"]]
        if not all(isinstance(url, str) and urlsplit(url).scheme in ("http", "ws") for url in urls):
            raise EnvironmentSetupError(
                f"environment.options.url={own['url']}: must be the address of an OpenEnv server, "
                "http://host:port."
            )
        self._urls = [url.rstrip("/").replace("ws://", "http://", 1) for url in urls]
        self._own, self._next = own, 0
        self._field = own["action"]

    async def start(self) -> None:
        self._http = aiohttp.ClientSession()
        if self._field is None:
            schema = await self._schema()
            required = schema.get("required") or []
            self._field = required[0] if len(required) == 1 else None

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        own, model = self._own, AsyncModelClient(episode)
        url = self._urls[self._next % len(self._urls)]
        self._next += 1
        row = episode.row
        reset = row.get("reset") or ({"seed": row["seed"]} if "seed" in row else {})
        messages = [{"role": "system", "content": own["system"]}] if own["system"] else []
        rewards: list[float] = []
        async with self._http.ws_connect(f"{url}/ws", max_msg_size=64 << 20) as socket:
            found = await _send_and_receive(socket, {"type": "reset", "data": reset})
            while not found.get("done") and len(rewards) < own["max_turns"]:
                messages.append({"role": "user", "content": self._text(found)})
                if (text := await model.reply(messages, **own["request"])) is None:
                    break
                action = self._action(text)
                found = await _send_and_receive(socket, {"type": "step", "data": action})
                rewards.append(float(found.get("reward") or 0.0))
            await socket.send_json({"type": "close"})
        return EpisodeScore(sum(rewards), rewards, {"turns": float(len(rewards))})

    async def _schema(self) -> dict[str, Any]:
        try:
            async with self._http.get(f"{self._urls[0]}/schema") as answer:
                return dict((await answer.json()).get("action") or {})
        except (aiohttp.ClientError, ValueError) as error:
            raise EnvironmentSetupError(
                f"environment.options.url={self._urls[0]}: no OpenEnv server answers there "
                f"({type(error).__name__}: {error}). Start it first."
            ) from error

    def _text(self, found: dict[str, Any]) -> str:
        observation = found.get("observation")
        if self._own["observation"] and isinstance(observation, dict):
            return str(observation.get(self._own["observation"], ""))
        return observation if isinstance(observation, str) else json.dumps(observation)

    def _action(self, answer: str) -> dict[str, Any]:
        text = answer.strip()
        try:
            action = json.loads(text)
        except ValueError:
            action = text
        if isinstance(action, dict):
            return action
        if self._field is None:
            return {"message": text}  # the server says what is wrong with it
        return {self._field: text if isinstance(action, str) else action}


async def _send_and_receive(socket: Any, message: dict[str, Any]) -> dict[str, Any]:
    await socket.send_json(message)
    answer = await socket.receive_json()
    if answer.get("type") == "error":
        data = answer.get("data") or {}
        raise EpisodeError(f"The OpenEnv server said: {data.get('message')} ({data.get('code')})")
    return dict(answer.get("data") or {})

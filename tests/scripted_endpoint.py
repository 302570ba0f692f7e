"""An HTTP endpoint that answers as OpenAI's does, from a script: for tests of environments."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from aiohttp import web


class ScriptedEndpoint:
    """Serves at a free port of the loopback address, in a thread.

    Args:
        script: From the messages of a request, or its text where it has token ids, to the text of
            the answer; by default it repeats the last message.
        folder: Of a tokenizer.

    Attributes:
        requests: Pairs of a session and the body of what was asked.
        answers: Pairs of a session and what it was answered.
        rewards: What programs reported, by session.
    """

    token = "secret"

    def __init__(
        self,
        script: Any = lambda messages: messages[-1]["content"],
        folder: str | None = None,
    ) -> None:
        self.script = script
        self.folder = folder
        if folder is not None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[tuple[str, Any]] = []
        self.rewards: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def serve() -> None:
            app = web.Application()
            for root in ("", "/session/{session}"):
                app.router.add_post(f"{root}/v1/chat/completions", self._chat)
                app.router.add_post(f"{root}/inference/v1/generate", self._generate)
                app.router.add_get(f"{root}/v1/models", self._models)
            app.router.add_post("/session/{session}/reward", self._reward)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            self._loop.create_task(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        started.wait()

    def url(self, session: str) -> str:
        return f"http://127.0.0.1:{self.port}/session/{session}/v1"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _chat(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        body = await request.json()
        self.requests.append((_session_of(request), body))
        answer = self.script(body["messages"])
        self.answers.append((_session_of(request), answer))
        if isinstance(answer, int):  # a status
            code = "context_length_exceeded" if answer == 400 else "server_error"
            error = {"message": f"status {answer}", "code": code}
            return web.json_response({"error": error}, status=answer)
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        described = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response({**described, "choices": [choice]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((_session_of(request), body))
        prompt = self.tokenizer.decode(body["token_ids"])
        found = self.tokenizer(self.script(prompt))["input_ids"] + [self.tokenizer.eos_token_id]
        content = [{"token": f"token_id:{one}", "token_id": one, "logprob": -1.0} for one in found]
        choice = {"index": 0, "token_ids": found, "finish_reason": "stop"}
        choice["logprobs"] = {"content": content}
        return web.json_response({"request_id": "1", "choices": [choice]})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "root": self.folder, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        self.rewards[request.match_info["session"]] = (await request.json())["reward"]
        return web.json_response({})


def _session_of(request: web.Request) -> str:
    return request.headers.get("X-Session-ID") or request.match_info["session"]

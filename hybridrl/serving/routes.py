"""The routes of the endpoint; all handlers run in its asyncio loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from hybridrl.serving.agent_session import ANY, REPORT, ROWS, SAMPLE, Permission, SessionRegistry
from hybridrl.serving.messages import compute_conversation_key, make_call_ids
from hybridrl.serving.outside import ExternalPrograms
from hybridrl.serving.pending_samples import PendingSamples, SessionPart, resolve_sampling
from hybridrl.serving.reply_builders import (
    ChatReplyBuilder,
    CompletionReplyBuilder,
    GenerateReplyBuilder,
    JsonObject,
    ReplyBuilder,
    SampledChoice,
)
from hybridrl.serving.reply_stream import ReplyStream
from hybridrl.serving.request_exchange import RequestExchange
from hybridrl.serving.request_parsing import (
    ApiError,
    ChatCompletionRequest,
    EpisodeReport,
    TextCompletionRequest,
    TokenGenerateRequest,
    make_field_error,
    parse,
    parse_json_object,
)
from hybridrl.serving.template_chat import ConversationError, TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SESSION_HEADER = "X-Session-ID"
PERMISSION: Any = getattr(web, "RequestKey", lambda name, kind: name)("permission", Permission)
"""Of a request: what its token allows."""
MOST_CHATS = 64
"""Chats with different options that are kept."""
EPISODE_POLL_TIMEOUT_S = 30.0
"""So long a program waits for an episode before it has to ask again."""


class ServedModel(NamedTuple):
    """The model that an endpoint serves.

    Attributes:
        name: What programs call it.
        chat: Renders its conversations; None: there is no chat template.
        vocabulary: Token ids are less than this.
        context_length: Longest prompt and response together, in tokens.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    chat: TemplateRenderer | None
    vocabulary: int
    context_length: int


class EndpointRoutes:
    """The HTTP routes of one model.

    Args:
        outside: Gives episodes to programs that ask for them; None: nothing does.
        patience_s: Seconds that a request waits for a generation to begin.
    """

    def __init__(
        self,
        model: ServedModel,
        sessions: SessionRegistry,
        exchange: RequestExchange,
        outside: ExternalPrograms | None,
        patience_s: float,
    ) -> None:
        self._model = model
        self._longest_token = max(map(len, model.tokenizer.get_vocab()), default=1)
        self._chat_with = lru_cache(MOST_CHATS)(self._make_chat)
        self._sessions = sessions
        self._exchange = exchange
        self._outside = outside
        self._patience_s = patience_s

    def add_to(self, app: web.Application) -> None:
        """Register all routes, with and without a session in the path."""
        for root in ("", "/session/{session}"):
            app.router.add_get(f"{root}/v1/models", self.models)
            app.router.add_post(f"{root}/v1/chat/completions", self.chat_completions)
            app.router.add_post(f"{root}/v1/completions", self.completions)
            app.router.add_post(f"{root}/inference/v1/generate", self.generate)
        app.router.add_post("/session/{session}/reward", self.reward)
        app.router.add_get("/episodes/next", self.next_episode)
        app.router.add_get("/health", self.health)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Reply that the endpoint is alive, and whether a generation is running."""
        answer = web.json_response({"status": "ok", "generating": self._exchange.is_attended})
        answer.force_close()  # what shows no token is not kept open
        return answer

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Reply with the only model."""
        card = {"id": self._model.name, "object": "model", "owned_by": "hybridrl", "created": 0}
        card["max_model_len"] = self._model.context_length
        card["root"] = self._model.tokenizer.name_or_path  # clients that send token ids load it
        return web.json_response({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Reply to chat messages."""
        asked = parse(ChatCompletionRequest, parse_json_object(await request.read()))
        self._check_model(asked.model)
        if self._model.chat is None:
            raise ApiError(
                400,
                f"The tokenizer of `{self._model.name}` has no chat template; use "
                "`/v1/completions`, or give it a template.",
            )
        self._check_length(*(str(message.get("content") or "") for message in asked.conversation))
        place = self._place(request, asked.seed)
        try:
            chat = self._chat_with(json.dumps(asked.options, sort_keys=True))
        except ConversationError as error:
            raise ApiError(400, str(error), param="chat_template_kwargs") from error
        try:
            prompt_ids = self._chat_prompt(chat, asked, place)
        except ConversationError as error:
            raise ApiError(400, str(error), param="messages") from error
        shape = ChatReplyBuilder(self._model.name, asked, self._model.tokenizer, chat)
        return await self._answer(request, place, [prompt_ids], shape, chat.stop_token_ids)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete prompts given as text or tokens."""
        asked = parse(TextCompletionRequest, parse_json_object(await request.read()))
        self._check_model(asked.model)
        for one in asked.prompts:
            self._check_length(one if isinstance(one, str) else "")
        prompts = [
            one if isinstance(one, list) else list(self._model.tokenizer(one)["input_ids"])
            for one in asked.prompts
        ]
        shape = CompletionReplyBuilder(self._model.name, asked, self._model.tokenizer)
        return await self._answer(request, self._place(request, asked.seed), prompts, shape)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt of tokens with tokens."""
        asked = parse(TokenGenerateRequest, parse_json_object(await request.read()))
        self._check_model(asked.model)
        shape = GenerateReplyBuilder(self._model.name, asked.options, self._model.tokenizer)
        place = self._place(request, asked.options.seed)
        return await self._answer(request, place, [asked.token_ids], shape)

    async def reward(self, request: web.Request) -> web.StreamResponse:
        """Record the reward that a program reports; ends the episode of an external program."""
        report = parse(EpisodeReport, parse_json_object(await request.read()))
        place = self._place(request, None, REPORT)
        place.session.report = report
        if self._outside is not None:
            self._outside.reported(place.session.name)
        return web.json_response({"session": place.session.name, "reward": report.reward})

    async def next_episode(self, request: web.Request) -> web.StreamResponse:
        """Reply with a row for an external program; status 204 if there is none now."""
        if request[PERMISSION].scope != ROWS:
            raise _forbidden(request, "take rows")
        if self._outside is None:
            raise ApiError(
                404,
                "The job plays its episodes itself (environment.name); no program need ask for "
                "them.",
            )
        play = await self._outside.next(EPISODE_POLL_TIMEOUT_S)
        if self._outside.is_closed:
            raise ApiError(410, "The job has ended: there are no more rows.", code="job_ended")
        if play is None:
            return web.Response(status=204)
        row: JsonObject = {"session": play.session, "url": play.url, "row": dict(play.row)}
        row |= {"greedy": play.greedy, "token": play.token, "report_token": play.report_token}
        try:
            return await _send_json(request, row)
        except BaseException:  # among them that the program has gone away
            self._outside.return_row(play)
            raise

    async def _answer(
        self,
        request: web.Request,
        place: SessionPart,
        prompts: Sequence[list[int]],
        shape: ReplyBuilder,
        stop_token_ids: Sequence[int] = (),
    ) -> web.StreamResponse:
        """Sample all prompts and send the replies; turns are recorded once complete, and discarded
        if the client has disconnected."""
        wishes = shape.wishes
        if max(wishes.stop_token_ids, default=0) >= self._model.vocabulary:
            known = self._model.vocabulary
            must = f"has a token that the model has not; it knows {known}"
            raise make_field_error("stop_token_ids", must)
        stream = ReplyStream(request, shape) if wishes.stream else None
        try:
            with PendingSamples(self._exchange, place, self._patience_s, wishes.stream) as asking:
                for prompt_ids in prompts:
                    room = self._room(prompt_ids)
                    sampling = resolve_sampling(wishes, place.session, room, stop_token_ids)
                    asking.ask(prompt_ids, sampling, wishes.n)
                if stream is not None:
                    await stream.follow(asking)
                turns = await asking.turns()
                await _check_client_connected(request)
                choices = []
                for reply, turn in zip(asking.replies, turns, strict=True):
                    said = shape.said(turn.token_ids, turn.prompt_ids)
                    ids = make_call_ids(reply.request.seed, len(said.calls))
                    choices.append(SampledChoice(turn, said, ids))
                    asking.record(turn, shape.key(choices[-1]))
                if stream is not None:
                    return await stream.finish(choices, prompts)
                return await _send_json(request, shape.whole(choices, prompts))
        except ApiError as error:
            if stream is not None and stream.has_begun:
                return await stream.fail(error)
            raise

    def _make_chat(self, options: str) -> TemplateRenderer:
        """Return the chat with the options of a request, given as JSON."""
        assert self._model.chat is not None
        found = json.loads(options)
        return self._model.chat.with_options(found) if found else self._model.chat

    def _chat_prompt(
        self, chat: TemplateRenderer, asked: ChatCompletionRequest, place: SessionPart
    ) -> list[int]:
        """Return the tokens of a conversation; a turn of this session keeps its sampled tokens."""
        messages, tools = asked.conversation, asked.functions
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if turns and (at := turns[-1]) < len(messages) - 1:
            key = compute_conversation_key(messages[: at + 1], tools, asked.options)
            if (known := place.session.known(key)) is not None:
                found = chat.continuation(messages, tools, at, known)
                if found is not None:
                    return found
        return chat.prompt(messages, tools)

    def _room(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens may follow the prompt."""
        if not prompt_ids:
            raise ApiError(400, "The prompt is empty.")
        known = self._model.vocabulary
        if (largest := max(prompt_ids)) >= known:
            raise ApiError(
                400, f"The prompt has the token {largest}; the model knows {known}, from 0 on."
            )
        room = self._model.context_length - len(prompt_ids)
        if room < 1:
            raise self._too_long(f"{len(prompt_ids)} tokens")
        return room

    def _check_length(self, *texts: str) -> None:
        """Refuse texts that cannot fit, by their characters: tokenizing them would block other
        requests."""
        characters = sum(map(len, texts))
        least = characters // self._longest_token
        if least >= self._model.context_length:
            raise self._too_long(f"more than {least} tokens ({characters} characters)")

    def _too_long(self, much: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self._model.context_length} tokens. However, "
            f"your messages resulted in {much}. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )

    def _place(self, request: web.Request, seed: int | None, scope: str = SAMPLE) -> SessionPart:
        """Return the session that a request names in its path or header, else a new untrained one.

        Raises:
            ApiError: if the token is not for this there, or the session is over.
        """
        part: Any = request.match_info.get("session") or request.headers.get(SESSION_HEADER)
        allowed, name = request[PERMISSION], part and part.partition(".")[0]
        if allowed.scope != scope and (name or allowed.scope == REPORT):
            raise _forbidden(request, f"{scope} in `{name}`" if name else scope)
        if name and allowed.session not in (name, ANY):
            raise _forbidden(request, f"{scope} in `{name}`")
        if not part:
            if allowed.scope == SAMPLE and allowed.session != ANY:
                raise _forbidden(request, "sample outside of its session")
            own = self._sessions.untrained(seed)
            return SessionPart(own, own.name)
        session = self._sessions.find(part)
        if session is None or (self._outside is not None and session.report is not None):
            raise ApiError(
                404,
                f"There is no session `{part}`, or it is over.",
                code="session_not_found",
            )
        return SessionPart(session, part)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; this is `{self._model.name}`.",
                code="model_not_found",
                param="model",
            )


def _forbidden(request: web.Request, what: str) -> ApiError:
    return ApiError(
        403,
        f"This token may not {what}: it {request[PERMISSION]}. Each session has its own tokens "
        "(docs/endpoint.md).",
        code="not_allowed",
    )


async def _check_client_connected(request: web.Request) -> None:
    """Let the loop notice a closed connection before anything of its request is recorded."""
    for _ in range(2):  # what is ready to be read is read after what waits now
        await asyncio.sleep(0)
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("The program has gone away.")


async def _send_json(request: web.Request, body: Any) -> web.StreamResponse:
    """Send a reply and wait until it is written, so that a closed connection raises here."""
    response = web.json_response(body)
    await response.prepare(request)
    await response.write_eof()
    return response

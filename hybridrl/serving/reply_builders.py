"""Builders of reply bodies in the formats of OpenAI and vLLM; every reply carries the sampled
tokens and their log-probabilities, whether they were asked for or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.rollout.rollout_engine import EngineOutput
from hybridrl.serving.messages import AssistantTurn, compute_conversation_key
from hybridrl.serving.request_parsing import ChatCompletionRequest, GenerationOptions
from hybridrl.serving.template_chat import TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JsonObject = dict[str, Any]


class SampledChoice(NamedTuple):
    """A complete choice of a reply.

    Attributes:
        turn: The sampled tokens.
        said: What they say.
        call_ids: An id for each tool call in it.
    """

    turn: EngineOutput
    said: AssistantTurn
    call_ids: list[str]


class ReplyBuilder:
    """A builder of the replies to one kind of request.

    Args:
        model: The name of the model in the replies.
        wishes: The options of the request.
        tokenizer: Decodes tokens into text.

    Attributes:
        streams_text: Whether a stream shows text as it grows; if not, nobody can tell before the
            end what it is.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""
    streams_text = True

    def __init__(
        self, model: str, wishes: GenerationOptions, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.wishes = wishes
        self._tokenizer = tokenizer
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        """Parse tokens into a turn, without the stop text that ended it."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return AssistantTurn(text).cut_at(self.wishes.stop)

    def key(self, choice: SampledChoice) -> str | None:
        """Return the key under which the session finds the turn again; None if it need not."""
        return None

    def opening(self, index: int) -> JsonObject | None:
        """Build the first chunk of a choice's stream; None if there is none."""
        return None

    def piece(self, index: int, new: AssistantTurn) -> JsonObject:
        """Build a chunk with the new part of a stream."""
        return {"index": index, **self._delta(new), "logprobs": None, "finish_reason": None}

    def last(self, index: int, choice: SampledChoice, new: AssistantTurn) -> JsonObject:
        """Build the last chunk of a choice's stream; `new` is the part that was not sent before."""
        return self._complete(index, choice, self._delta(new))

    def whole(self, choices: Sequence[SampledChoice], prompts: Sequence[list[int]]) -> JsonObject:
        """Build the body with all choices."""
        built = [
            self._complete(index, one, self._content(one)) for index, one in enumerate(choices)
        ]
        body = self._head | {"object": self.kind, "choices": built}
        body["usage"] = count_usage(choices, prompts)
        if self.wishes.return_token_ids:
            body["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else list(prompts)
        return body

    def event(self, choices: Sequence[JsonObject], **further: Any) -> JsonObject:
        """Build the body of one event of a stream."""
        return self._head | {"object": self.chunk_kind, "choices": list(choices)} | further

    def _complete(self, index: int, choice: SampledChoice, content: JsonObject) -> JsonObject:
        turn, wants_log_probs = choice.turn, self.wishes.alternatives is not None
        return {
            "index": index,
            **content,
            "logprobs": self._log_probs(turn) if wants_log_probs else None,
            "finish_reason": "tool_calls" if choice.said.calls else turn.finish_reason,
            "token_ids": turn.token_ids,
            "token_logprobs": turn.log_probs,
        }

    def _content(self, choice: SampledChoice) -> JsonObject:
        raise NotImplementedError

    def _delta(self, new: AssistantTurn) -> JsonObject:
        raise NotImplementedError

    def _log_probs(self, turn: EngineOutput) -> JsonObject:
        raise NotImplementedError


class ChatReplyBuilder(ReplyBuilder):
    """A builder of the replies of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        model: str,
        asked: ChatCompletionRequest,
        tokenizer: PreTrainedTokenizerBase,
        chat: TemplateRenderer,
    ) -> None:
        super().__init__(model, asked, tokenizer)
        self._asked, self._chat = asked, chat
        self._callable = asked.functions if asked.may_call else []
        self.streams_text = not asked.may_call

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        return self._chat.said(token_ids, prompt_ids, self._callable).cut_at(self.wishes.stop)

    def key(self, choice: SampledChoice) -> str | None:
        asked = self._asked
        messages = [*asked.conversation, choice.said.message(choice.call_ids)]
        return compute_conversation_key(messages, asked.functions, asked.options)

    def opening(self, index: int) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return self.piece(index, AssistantTurn("")) | {"delta": delta}

    def last(self, index: int, choice: SampledChoice, new: AssistantTurn) -> JsonObject:
        body = super().last(index, choice, new)
        if choice.said.calls:
            calls = choice.said.message(choice.call_ids)["tool_calls"]
            body["delta"]["tool_calls"] = [call | {"index": n} for n, call in enumerate(calls)]
        return body

    def _content(self, choice: SampledChoice) -> JsonObject:
        return {"message": choice.said.message(choice.call_ids)}

    def _delta(self, new: AssistantTurn) -> JsonObject:
        fields = {"content": new.content, "reasoning_content": new.reasoning}
        return {"delta": {name: text for name, text in fields.items() if text}}

    def _log_probs(self, turn: EngineOutput) -> JsonObject:
        content = []
        for token, log_prob in zip(turn.token_ids, turn.log_probs, strict=True):
            text = str(self._tokenizer.decode([token]))
            entry: JsonObject = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
            content.append(entry | {"top_logprobs": [entry] if self.wishes.alternatives else []})
        return {"content": content, "refusal": None}


class CompletionReplyBuilder(ReplyBuilder):
    """A builder of the replies of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _content(self, choice: SampledChoice) -> JsonObject:
        return {"text": choice.said.content}

    def _delta(self, new: AssistantTurn) -> JsonObject:
        return {"text": new.content}

    def _log_probs(self, turn: EngineOutput) -> JsonObject:
        texts = [self._tokenizer.decode([token]) for token in turn.token_ids]
        offsets = [0]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        likeliest = [{text: x} for text, x in zip(texts, turn.log_probs, strict=True)]
        return {
            "tokens": texts,
            "token_logprobs": turn.log_probs,
            "top_logprobs": likeliest if self.wishes.alternatives else None,
            "text_offset": offsets,
        }


class GenerateReplyBuilder(ReplyBuilder):
    """A builder of the replies of `/inference/v1/generate`, which are never streamed."""

    kind, prefix = "generate", "generate"

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        return AssistantTurn("")

    def whole(self, choices: Sequence[SampledChoice], prompts: Sequence[list[int]]) -> JsonObject:
        body = super().whole(choices, prompts)
        return body | {"request_id": body["id"]}

    def _complete(self, index: int, choice: SampledChoice, content: JsonObject) -> JsonObject:
        """Build one choice; each token is given as text for older clients and as a number for newer
        ones."""
        turn = choice.turn
        entries = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": x, "top_logprobs": []}
            for token, x in zip(turn.token_ids, turn.log_probs, strict=True)
        ]
        return {
            "index": index,
            "token_ids": turn.token_ids,
            "logprobs": {"content": entries},
            "finish_reason": turn.finish_reason,
        }

    def _content(self, choice: SampledChoice) -> JsonObject:
        return {}


def count_usage(choices: Sequence[SampledChoice], prompts: Sequence[list[int]]) -> JsonObject:
    """Return the token counts of a reply; each prompt counts once."""
    read, sampled = sum(map(len, prompts)), sum(len(one.turn.token_ids) for one in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
    }

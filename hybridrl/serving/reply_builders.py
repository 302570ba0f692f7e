"""Builders of reply bodies in the formats of OpenAI and vLLM; every reply carries the sampled
tokens and their log-probabilities. In each of them are the tokens that were sampled and their
log-probabilities, whether they were asked for or not."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.serving.agent_session import SampledTurn
from hybridrl.serving.chat import ConversationRenderer
from hybridrl.serving.messages import AssistantTurn, compute_prefix_keys
from hybridrl.serving.request_parsing import ChatCompletionRequest, GenerationOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JsonObject = dict[str, Any]


class ReplyBuilder(ABC):
    """A builder of the replies to one kind of request.

    Args:
        model: The name that they tell.
        wishes: Of the request.
        tokenizer: For the texts of tokens.

    Attributes:
        streams_text: Whether a stream shows text as it grows; if not, nobody can tell before the
            end what it is.
    """

    kind = ""
    prefix = ""
    streams_text = True

    def __init__(
        self, model: str, wishes: GenerationOptions, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.wishes = wishes
        self._tokenizer = tokenizer
        name, self._made = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._head = {"id": name, "created": self._made, "model": model}

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        """Parse tokens into a turn, without the stop text that ended it."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return AssistantTurn(text).cut_at(self.wishes.stop)

    def key(self, said: AssistantTurn, call_ids: Sequence[str]) -> str | None:
        """Return the key under which the session finds the turn again; None if it need not. None:
        it need not."""
        return None

    @abstractmethod
    def choice(
        self, index: int, turn: SampledTurn, said: AssistantTurn, call_ids: Sequence[str]
    ) -> JsonObject:
        """Build one choice of the reply."""

    def opening(self, index: int) -> JsonObject | None:
        """Build the first chunk of a choice's stream; None if there is none."""
        return None

    @abstractmethod
    def piece(self, index: int, new: AssistantTurn) -> JsonObject:
        """Build a chunk with the new part of a stream."""

    @abstractmethod
    def last(
        self,
        index: int,
        turn: SampledTurn,
        said: AssistantTurn,
        new: AssistantTurn,
        call_ids: Sequence[str],
    ) -> JsonObject:
        """Build the last chunk of a choice's stream; `new` is the part that was not sent before.
        `new` of it was not told before."""

    def whole(
        self,
        choices: Sequence[JsonObject],
        turns: Sequence[SampledTurn],
        prompts: Sequence[list[int]],
    ) -> JsonObject:
        """Build the body with all choices."""
        body = self._head | {"object": self.kind, "choices": list(choices)}
        return body | {"usage": count_usage(turns, prompts)} | self._of_prompt(prompts)

    def event(self, choices: Sequence[JsonObject], **further: Any) -> JsonObject:
        """Build the body of one event of a stream."""
        return self._head | {"object": self.kind, "choices": list(choices)} | further

    def _of_prompt(self, prompts: Sequence[list[int]]) -> JsonObject:
        if not self.wishes.return_token_ids:
            return {}
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else list(prompts)}


class ChatReplyBuilder(ReplyBuilder):
    """A builder of the replies of `/v1/chat/completions`."""

    kind, prefix = "chat.completion", "chatcmpl"

    def __init__(
        self,
        model: str,
        asked: ChatCompletionRequest,
        tokenizer: PreTrainedTokenizerBase,
        chat: ConversationRenderer,
    ) -> None:
        super().__init__(model, asked, tokenizer)
        self._asked, self._chat = asked, chat
        self._callable = asked.functions if asked.may_call else []
        self.streams_text = not asked.may_call

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        return self._chat.said(token_ids, prompt_ids, self._callable).cut_at(self.wishes.stop)

    def key(self, said: AssistantTurn, call_ids: Sequence[str]) -> str | None:
        asked = self._asked
        messages = [*asked.conversation, said.message(call_ids)]
        *_, key = compute_prefix_keys(messages, asked.functions, asked.options)
        return key

    def choice(
        self, index: int, turn: SampledTurn, said: AssistantTurn, call_ids: Sequence[str]
    ) -> JsonObject:
        return self._ended(index, turn, said, {"message": said.message(call_ids)})

    def opening(self, index: int) -> JsonObject | None:
        return self._choice(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, new: AssistantTurn) -> JsonObject:
        delta = {"content": new.content} if new.content else {}
        if new.reasoning:
            delta["reasoning_content"] = new.reasoning
        return self._choice(index, delta)

    def last(
        self,
        index: int,
        turn: SampledTurn,
        said: AssistantTurn,
        new: AssistantTurn,
        call_ids: Sequence[str],
    ) -> JsonObject:
        delta = self.piece(index, new)["delta"]
        if said.calls:
            calls = said.message(call_ids)["tool_calls"]
            delta["tool_calls"] = [call | {"index": n} for n, call in enumerate(calls)]
        return self._ended(index, turn, said, {"delta": delta})

    def event(self, choices: Sequence[JsonObject], **further: Any) -> JsonObject:
        return super().event(choices, **further) | {"object": "chat.completion.chunk"}

    def _choice(self, index: int, delta: JsonObject) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _ended(
        self, index: int, turn: SampledTurn, said: AssistantTurn, what: JsonObject
    ) -> JsonObject:
        return {
            "index": index,
            **what,
            "logprobs": self._log_probs(turn) if self.wishes.alternatives is not None else None,
            "finish_reason": "tool_calls" if said.calls else turn.finish_reason,
            **sampled_token_fields(turn),
        }

    def _log_probs(self, turn: SampledTurn) -> JsonObject:
        content = []
        for token, log_prob in zip(turn.token_ids, turn.log_probs, strict=True):
            text = self._tokenizer.decode([token])
            entry: JsonObject = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
            content.append(entry | {"top_logprobs": [entry] if self.wishes.alternatives else []})
        return {"content": content, "refusal": None}


class CompletionReplyBuilder(ReplyBuilder):
    """A builder of the replies of `/v1/completions`."""

    kind, prefix = "text_completion", "cmpl"

    def choice(
        self, index: int, turn: SampledTurn, said: AssistantTurn, call_ids: Sequence[str]
    ) -> JsonObject:
        return {
            "index": index,
            "text": said.content,
            "logprobs": self._log_probs(turn) if self.wishes.alternatives is not None else None,
            "finish_reason": turn.finish_reason,
            **sampled_token_fields(turn),
        }

    def piece(self, index: int, new: AssistantTurn) -> JsonObject:
        return {"index": index, "text": new.content, "logprobs": None, "finish_reason": None}

    def last(
        self,
        index: int,
        turn: SampledTurn,
        said: AssistantTurn,
        new: AssistantTurn,
        call_ids: Sequence[str],
    ) -> JsonObject:
        return self.choice(index, turn, new, call_ids)

    def _log_probs(self, turn: SampledTurn) -> JsonObject:
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
    """A builder of the replies of `/inference/v1/generate`."""

    kind, prefix = "generate", "generate"

    def said(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> AssistantTurn:
        return AssistantTurn("")

    def choice(
        self, index: int, turn: SampledTurn, said: AssistantTurn, call_ids: Sequence[str]
    ) -> JsonObject:
        """Build one choice; each token is given as text for older clients and as a number for newer
        ones."""
        content = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": x, "top_logprobs": []}
            for token, x in zip(turn.token_ids, turn.log_probs, strict=True)
        ]
        return {
            "index": index,
            "token_ids": turn.token_ids,
            "logprobs": {"content": content},
            "finish_reason": turn.finish_reason,
        }

    def whole(
        self,
        choices: Sequence[JsonObject],
        turns: Sequence[SampledTurn],
        prompts: Sequence[list[int]],
    ) -> JsonObject:
        body = super().whole(choices, turns, prompts)
        return body | {"request_id": body["id"]}

    def piece(self, index: int, new: AssistantTurn) -> JsonObject:
        raise NotImplementedError

    def last(
        self,
        index: int,
        turn: SampledTurn,
        said: AssistantTurn,
        new: AssistantTurn,
        call_ids: Sequence[str],
    ) -> JsonObject:
        raise NotImplementedError


def count_usage(turns: Sequence[SampledTurn], prompts: Sequence[list[int]]) -> JsonObject:
    """Return the token counts of a reply; each prompt counts once."""
    read, sampled = sum(map(len, prompts)), sum(len(turn.token_ids) for turn in turns)
    return {
        "prompt_tokens": read,
        "completion_tokens": sampled,
        "total_tokens": read + sampled,
    }


def sampled_token_fields(turn: SampledTurn) -> JsonObject:
    """Return the sampled tokens and their log-probabilities as fields of a choice."""
    return {"token_ids": turn.token_ids, "token_logprobs": turn.log_probs}

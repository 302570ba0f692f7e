"""RendererChat: models that the package `renderers` knows; and which chat a model gets."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.conversations.messages import Message, Tool, read_messages
from hybridrl.serving.chat import Chat, ChatError
from hybridrl.serving.messages import Call, Said, as_json
from hybridrl.serving.session import Known
from hybridrl.serving.template_chat import TemplateChat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


class RendererChat(Chat):
    """By the package `renderers`, which knows the formats of many models: what they think, and how
    they call tools."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(
                    read_messages(messages), tools=list(tools) or None, add_generation_prompt=True
                )
            )
        except Exception as error:  # of many kinds, as the renderers are
            raise ChatError(f"The chat template refuses these messages: {error}") from error

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Tool], at: int, known: Known
    ) -> list[int] | None:
        try:
            found = self._renderer.bridge_to_next_turn(
                known.prompt_ids,
                known.token_ids,
                read_messages(messages[at + 1 :]),
                tools=list(tools) or None,
            )
        except Exception as error:
            raise ChatError(f"The chat template refuses these messages: {error}") from error
        kept = [*known.prompt_ids, *known.token_ids]
        if found is None or list(found.token_ids[: len(kept)]) != kept:
            return None
        return list(found.token_ids)

    def said(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool]
    ) -> Said:
        parsed = self._renderer.parse_response(
            list(token_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        calls, broken = [], []
        for call in parsed.tool_calls:
            if str(call.status) == "ok" and call.name:
                calls.append(Call(call.name, as_json(call.arguments or {})))
            else:
                broken.append(call.raw)
        return Said(
            "".join([parsed.content or "", *broken]), tuple(calls), parsed.reasoning_content
        )


def chat_of(tokenizer: PreTrainedTokenizerBase, model: str) -> Chat | None:
    """The chat of a model; None if its tokenizer has no chat template.

    Args:
        model: Its folder or hub name. A renderer is taken by that, if it writes a conversation just
            as the tokenizer's own template does.
    """
    if not tokenizer.chat_template:
        return None
    chat = TemplateChat(tokenizer)
    known = map(RendererChat, _renderers_of(tokenizer, model))
    return next((one for one in known if _agree(one, chat)), chat)


def _renderers_of(tokenizer: PreTrainedTokenizerBase, model: str) -> Iterator[Any]:
    """The renderers of the package `renderers` for models of this name: those of several owners may
    have the same."""
    try:
        from renderers import config_from_name, create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return
    last = model.rstrip("/").rpartition("/")[2]
    kinds = [k for name, k in MODEL_RENDERER_MAP.items() if name.rpartition("/")[2] == last]
    for kind in dict.fromkeys(kinds):
        try:
            yield create_renderer(tokenizer, config_from_name(kind))
        except Exception as error:  # it wants tokens that this tokenizer lacks, say
            _log.info("no renderer for %s: %s", model, error)


_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "t", "description": "d", "parameters": {"type": "object"}},
}


def _agree(renderer: Chat, template: Chat) -> bool:
    """Whether both write conversations alike. A model that was trained on from one of this name may
    have another template."""
    for messages, tools in itertools.product(_PROBES, ([], [_PROBE_TOOL])):
        try:
            if renderer.prompt(messages, tools) != template.prompt(messages, tools):
                return False
        except ChatError:
            return False
    return True

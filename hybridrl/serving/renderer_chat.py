"""Renderers of the package `renderers`, and the choice of a renderer for a model."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybridrl.conversations.messages import Message, ToolSchema, read_messages
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.messages import AssistantTurn, ToolCall, format_arguments
from hybridrl.serving.template_chat import ConversationError, TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_DATE = "conversation_start_date"
"""What renderers call the date that a template asks the clock for."""


class LibraryRenderer(TemplateRenderer):
    """A renderer of the package `renderers`, which knows the formats of many models: how they mark
    reasoning and call tools. Prompts are those of the tokenizer's own template, as in the data.

    Args:
        renderer: Parses what the model wrote.
        template: Writes the prompts.
        kind: The name of the renderer in its package.
    """

    def __init__(self, renderer: Any, template: TemplateRenderer, kind: str) -> None:
        super().__init__(template.tokenizer, template.context)
        self._renderer, self._kind = renderer, kind
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        bridge = _renderer_of(kind, template)
        fits = bridge and _renders_like_template(bridge, template, _PROBE_CONVERSATIONS[:1])
        self._bridge = bridge if fits else None

    def with_options(self, options: Mapping[str, Any]) -> LibraryRenderer:
        return LibraryRenderer(self._renderer, super().with_options(options), self._kind)

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], at: int, known: TurnTokens
    ) -> list[int] | None:
        if self._bridge is None:  # it does not know the template's options
            return super().continuation(messages, tools, at, known)
        try:
            found = self._bridge.bridge_to_next_turn(
                known.prompt_ids,
                known.token_ids,
                read_messages(messages[at + 1 :]),
                tools=list(tools) or None,
            )
        except Exception as error:
            raise ConversationError(f"The chat template refuses these messages: {error}") from error
        kept = [*known.prompt_ids, *known.token_ids]
        if found is None or list(found.token_ids[: len(kept)]) != kept:
            return None
        return list(found.token_ids)

    def said(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSchema]
    ) -> AssistantTurn:
        parsed = self._renderer.parse_response(
            list(token_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        calls, broken = [], []
        for call in parsed.tool_calls:
            if str(call.status) == "ok" and call.name:
                calls.append(ToolCall(call.name, format_arguments(call.arguments or {})))
            else:
                broken.append(call.raw)
        return AssistantTurn(
            "".join([parsed.content or "", *broken]), tuple(calls), parsed.reasoning_content
        )


def choose_renderer(
    tokenizer: PreTrainedTokenizerBase, model: str, context: TemplateContext | None = None
) -> TemplateRenderer | None:
    """Return the renderer of a model; None if its tokenizer has no chat template.

    Args:
        model: Its folder or hub name. A renderer is taken by that, if it writes a conversation just
            as the tokenizer's own template does.
        context: Options of the template, and the date of the run.
    """
    if not tokenizer.chat_template:
        return None
    template = TemplateRenderer(tokenizer, context)
    plain = TemplateRenderer(tokenizer, replace(template.context, options={}))
    for kind in _kinds_of(model):
        renderer = _renderer_of(kind, plain)
        if renderer is not None and _renders_like_template(renderer, plain, _PROBE_CONVERSATIONS):
            return LibraryRenderer(renderer, template, kind)
    return template


def _kinds_of(model: str) -> list[str]:
    """Return the renderers of the package `renderers` for models of this name; models of several
    owners may have the same name."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return []
    last = model.rstrip("/").rpartition("/")[2]
    kinds = [k for name, k in MODEL_RENDERER_MAP.items() if name.rpartition("/")[2] == last]
    return list(dict.fromkeys(kinds))


def _renderer_of(kind: str, template: TemplateRenderer) -> Any:
    """Return the renderer with the template's options and date; None if it does not know them."""
    from renderers import config_from_name, create_renderer
    from renderers.base import merge_chat_template_kwargs, template_field_names

    options, date = dict(template.context.options), template.context.date
    try:
        config: Any = config_from_name(kind)
        if date is not None and _DATE in template_field_names(config):
            options = {_DATE: date.isoformat(), **options}
        return create_renderer(template.tokenizer, merge_chat_template_kwargs(config, options))
    except Exception as error:  # it wants tokens that this tokenizer lacks, say
        _log.info("no renderer %s for %s: %s", kind, template.tokenizer.name_or_path, error)
        return None


_PROBE_CONVERSATIONS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)
_PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "t", "description": "d", "parameters": {"type": "object"}},
}


def _renders_like_template(
    renderer: Any, template: TemplateRenderer, probes: Sequence[list[Message]]
) -> bool:
    """Return whether both renderers produce the same tokens; a fine-tuned model of this name may
    have another template."""
    for messages, tools in itertools.product(probes, ([], [_PROBE_TOOL])):
        try:
            found = renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
            if list(found) != template.prompt(messages, tools):
                return False
        except Exception:  # of many kinds, as the renderers are
            return False
    return True

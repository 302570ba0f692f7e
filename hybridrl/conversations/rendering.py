"""Rendering: conversations become text by the tokenizer's chat template."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from hybridrl.conversations.messages import Message, ToolSchema
from hybridrl.errors import ConfigError, HybridRLError, suggest_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GIVEN = {"messages", "tools", "add_generation_prompt"}
"""Variables of templates that are no options."""
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
"""A statement of transformers' own, which jinja2 does not know."""


class ChatTemplateError(HybridRLError):
    """A chat template refuses a conversation. Quotes what it says."""


@dataclass(frozen=True)
class TemplateContext:
    """The variables of a chat template beside the messages.

    Attributes:
        options: Its own variables, such as `enable_thinking` (`data.chat_template_options`).
        date: The date of the run (`data.date`), which `strftime_now` of a template gives in place
            of the clock's; None: the clock's.
        tools: Functions that the model may call, as `read_tools` returns them.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    date: datetime.date | None = None
    tools: Sequence[ToolSchema] = ()

    @classmethod
    def of(cls, options: Mapping[str, Any], date: str | None) -> TemplateContext:
        """Build it from the settings `data.chat_template_options` and `data.date`."""
        return cls(dict(options), None if date is None else datetime.date.fromisoformat(date))

    def with_tools(self, tools: Sequence[ToolSchema]) -> TemplateContext:
        """Return the same context with these tools."""
        return replace(self, tools=tools)

    def with_options(self, options: Mapping[str, Any]) -> TemplateContext:
        """Return the same context with further options, which win."""
        return replace(self, options={**self.options, **options})


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    context: TemplateContext,
    *,
    ask: bool,
) -> str:
    """Return a conversation as text.

    Args:
        messages: As `read_messages` returns them.
        ask: Whether the generation prompt follows, which opens the assistant's next turn.

    Raises:
        ChatTemplateError: if the template refuses the messages.
    """
    further: dict[str, Any] = dict(context.options)
    if context.date is not None:
        further["strftime_now"] = context.date.strftime  # a variable goes before the clock's own
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=list(context.tools) or None,
            tokenize=False,
            add_generation_prompt=ask,
            **further,
        )
    except Exception as error:  # templates raise jinja2 errors, among them their own complaints
        raise ChatTemplateError(str(error)) from error
    return str(text)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts that the tokenizer reads as special tokens, the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    return sorted(filter(None, special), key=len, reverse=True)


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names that the chat template reads, those of the messages and tools included;
    none without a template."""
    return frozenset().union(*map(_variables, template_sources(tokenizer)))


def template_sources(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the source of the chat template, or of each where there are several."""
    template = tokenizer.chat_template or {}
    return [template] if isinstance(template, str) else list(template.values())


def check_options(
    options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, setting: str
) -> None:
    """Refuse options that the chat template never reads.

    Args:
        setting: What gives them, for messages.

    Raises:
        ConfigError: names the option and what the template reads.
    """
    known = sorted(template_variables(tokenizer) - _GIVEN)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{setting}.{name}: the chat template of `{tokenizer.name_or_path}` does not read "
                f"it; it reads {', '.join(known) or 'no options'}.{suggest_name(name, known)}"
            )


@cache
def _variables(template: str) -> frozenset[str]:
    import jinja2
    from jinja2 import meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateError:  # rendering will say so
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed))

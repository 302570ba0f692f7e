"""The token that closes an assistant's turn, found by rendering a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridrl.conversations.messages import Message
from hybridrl.conversations.rendering import ChatTemplateError, TemplateContext, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "hybridrl5e27answer"
"""What the assistant says in that conversation."""
ASKED: Message = {"role": "user", "content": "a"}
ANSWERED: Message = {"role": "assistant", "content": ANSWER}


def closing_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that follows an assistant's last message in the chat template; where none
    does, the one that opens the user's next message. None if there is no template, or no token."""
    if not tokenizer.chat_template:
        return None
    for messages in ([ASKED, ANSWERED], [ASKED, ANSWERED, ASKED]):
        if (token := _token_behind(tokenizer, messages)) is not None:
            return token
    return None


def _token_behind(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> int | None:
    try:
        text = render_chat(tokenizer, messages, TemplateContext(), ask=False)
    except ChatTemplateError:
        return None
    _, _, tail = text.rpartition(ANSWER)
    tail = tail.lstrip()
    added = tokenizer.added_tokens_decoder.items()
    fitting = [(token.content, number) for number, token in added if token.content]
    found = [one for one in fitting if tail.startswith(one[0])]
    return max(found, key=lambda one: len(one[0]))[1] if found else None

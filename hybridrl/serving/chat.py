"""The interface of conversation renderers, which turn messages into tokens and tokens into
messages.

Tokens of earlier turns are never made again from their text: what a model sampled need not be what
its tokenizer makes of that, and a policy trained on other tokens than it sampled learns from
log-probabilities that were never its own. So of a conversation that goes on, only what is new is
tokenized.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.conversations.messages import Message, ToolSchema
from hybridrl.errors import HybridRLError
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.messages import AssistantTurn


class ConversationError(HybridRLError):
    """The chat template refuses a conversation, or there is no template; the message quotes it.
    Says what it said."""


class ConversationRenderer(ABC):
    """A renderer for the conversations of one model.

    Attributes:
        stop_token_ids: Tokens that end a turn, besides the model's own.
    """

    stop_token_ids: tuple[int, ...] = ()

    @abstractmethod
    def with_options(self, options: Mapping[str, Any]) -> ConversationRenderer:
        """Return the chat whose template has these variables, which win over those of the job.

        Raises:
            ChatError: if the template does not read one of them.
        """

    @abstractmethod
    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Return the tokens of a conversation that the model is to continue.

        Raises:
            ChatError: if the template refuses it.
        """

    @abstractmethod
    def continuation(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], at: int, known: TurnTokens
    ) -> list[int] | None:
        """Return the tokens of a conversation in which an earlier turn keeps its sampled tokens.

        Args:
            at: The message that is this turn; only others than the assistant's follow.
            known: The turn.

        Returns:
            All tokens of the turn, then what is new; None if the template does not keep what it
            wrote before, as those do that leave out what was thought in earlier turns.
        """

    @abstractmethod
    def said(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[ToolSchema]
    ) -> AssistantTurn:
        """Parse the tokens of a turn into text, reasoning and tool calls."""

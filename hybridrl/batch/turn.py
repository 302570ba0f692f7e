"""The interface by which a user's environment or tool takes part in a sample.

A class of the user's, named by `rollout.episode`, is built once for each sample. The model's turns
and its answers alternate until it says `done`, or a limit ends the episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

EPISODE_FAILURES = ("error", "crash", "timeout", "memory", "output")
"""How an environment in a process of its own may fail to play an episode: finish reasons."""


@dataclass(frozen=True)
class Turn:
    """The response of an environment or tool to a turn of the model.

    Attributes:
        text: What it says. Tokenized by itself and appended; the model goes on after it. Names of
            special tokens in it become those tokens, so that a chat template's glue can be written
            here; give `token_ids` for text of others that must not.
        token_ids: What it says as token ids, in place of `text`. Only what is new, never the
            conversation so far.
        reward: For the model's turn; the rewards of all turns add up to the episode's.
        done: Whether the episode is over. What a last turn says is not appended: no token of the
            model would come after it.
    """

    text: str = ""
    token_ids: Sequence[int] | None = None
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        if self.text and self.token_ids is not None:
            raise ValueError(
                "A Turn has a text or token_ids, not both: the model sees one of them."
            )
        if not math.isfinite(self.reward):
            raise ValueError(f"The reward of a Turn is {self.reward}; it must be a finite number.")


class Episode(Protocol):
    """The protocol of a class that `rollout.episode` names. It need not derive from this one.

    All objects of a rank share one asyncio loop, in a thread of its own, while the engine goes on
    with other samples. Whatever blocks goes into `await asyncio.to_thread(...)`. Each call has
    `rollout.tool_timeout_s`; one that takes longer is cancelled and ends its episode with the
    finish reason `tool_timeout`, and one that raises, with `tool_error`.

    An optional `async def close(self)` is called when the episode is over, however it ended.
    """

    async def reset(self, row: Mapping[str, Any]) -> Turn | None:
        """Start the episode.

        Args:
            row: The prompt's columns, as reward functions get them: `prompt`, `answer` and every
                further column of the data.

        Returns:
            What the model sees after the prompt, if anything; only its text or token ids count.
        """

    async def step(self, response_text: str, response_ids: list[int]) -> Turn:
        """Respond to one turn of the model.

        Args:
            response_text: What the model wrote in this turn, without special tokens. A text of
                `rollout.stop` that ended the turn stays in it.
            response_ids: Its tokens.
        """

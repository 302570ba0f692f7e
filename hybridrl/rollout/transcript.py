"""The exact tokens of a sample of several turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.batch.kept_sets import WHOLE_VOCABULARY, KeptSets
from hybridrl.errors import RolloutError
from hybridrl.rollout.rollout_engine import EngineOutput

_GROWING = (list, KeptSets)


class TokenTranscript:
    """A sample token by token, with mask, log-probability, turn and version; it only grows.

    Text of earlier turns is never tokenized again. What the model samples need not be what a
    tokenizer makes of the same text, and a policy trained on other tokens than it sampled learns
    from log-probabilities that were never its own.

    Attributes:
        response_ids: Everything after the prompt: sampled tokens, and those given to the model.
        mask: For each of them 1 if it was sampled, 0 if it was given.
        log_probs: Of the sampled tokens; 0.0 for the others.
        turns: For each of them the turn of the model that it belongs to, from 0; a given token
            belongs to the turn before it.
        versions: For each of them the policy version that sampled it; 0 if it was given.
        kept: For each of them what it was chosen from; a given token from the whole vocabulary.
        sampled_turns: How many turns of the model it has.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.mask: list[int] = []
        self.log_probs: list[float] = []
        self.turns: list[int] = []
        self.versions: list[int] = []
        self.kept = KeptSets()
        self.sampled_turns = 0
        self._turn = -1

    def __len__(self) -> int:
        """Return the number of response tokens so far."""
        return len(self.response_ids)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and response so far, exactly as the next request contains them."""
        return self.prompt_ids + self.response_ids

    @property
    def sampled(self) -> int:
        """The number of response tokens that the model sampled."""
        return sum(self.mask)

    def add_sampled(self, output: EngineOutput, turn: int | None = None) -> None:
        """Append a turn of the model.

        Args:
            output: The engine's. Without `versions` these are 0, without `kept` sets each token was
                chosen from the whole vocabulary.
            turn: Its number in the episode, where that has other transcripts beside this one;
                None: the one after the last of this one.

        Raises:
            RolloutError: if the tokens that it continues are not exactly those so far.
        """
        expected, found = self.token_ids, list(output.prompt_ids)
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            shorter = min(len(found), len(expected))
            first = next((place for place, (a, b) in pairs if a != b), shorter)
            raise RolloutError(
                f"The engine continued {len(found)} tokens that are not the {len(expected)} of the "
                f"sample so far; they differ from token {first} on: {found[first : first + 8]} "
                f"instead of {expected[first : first + 8]}. Earlier turns must be passed on as "
                "token ids, never as text that is tokenized again."
            )
        self._turn = self._turn + 1 if turn is None else turn
        self.sampled_turns += 1
        token_ids, versions = output.token_ids, output.versions or [0] * len(output.token_ids)
        self._append(token_ids, 1, output.log_probs, versions, output.kept)

    def add_given(self, token_ids: Sequence[int]) -> None:
        """Append a turn of the environment or tool."""
        self._append(token_ids, 0, [0.0] * len(token_ids), [0] * len(token_ids))

    def mark(self) -> Mapping[str, Any]:
        """Return the current length of every list, for `return_to`."""
        return {n: len(v) if isinstance(v, _GROWING) else v for n, v in vars(self).items()}

    def return_to(self, mark: Mapping[str, Any]) -> None:
        """Remove all that was appended since the snapshot."""
        for name, value in mark.items():
            if isinstance(grown := getattr(self, name), KeptSets):
                grown.cut(value)
            elif isinstance(grown, list):
                del grown[value:]
            else:
                setattr(self, name, value)

    def _append(
        self,
        token_ids: Sequence[int],
        mask: int,
        log_probs: Sequence[float],
        versions: Sequence[int],
        kept: KeptSets | None = None,
    ) -> None:
        self.response_ids += token_ids
        self.mask += [mask] * len(token_ids)
        self.log_probs += log_probs
        self.turns += [max(0, self._turn)] * len(token_ids)
        self.versions += versions
        if kept is None:
            self.kept.add(WHOLE_VOCABULARY, len(token_ids))
        else:
            self.kept.extend(kept)

"""The state of a micro-batch of samples, which all stages of a pipeline update alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.systems.unequal_generation.generation_plan import split_evenly
from hybridrl.systems.unequal_generation.growing_cache import GrowingCache, left_padded_positions


class DecodeMicroBatch:
    """A micro-batch of samples as one stage sees it. All stages change it alike: what decides is
    only which tokens there are and which of them end a sample.

    Args:
        prompts: Of each sample.
        seeds: Of each sample.
        layers: Of this stage.
        max_tokens: Longest response.

    Attributes:
        rows: Numbers of the samples that are still in the cache.
        token_ids: Of each sample so far.
        ended: Whether each has come to an end of its own.
        position: How many tokens the samples have that go on.
        last: Of these, the last ones, ``[rows]``.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        layers: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._prompts, self._device, self._max_tokens = prompts, device, max_tokens
        self.rows = list(range(len(prompts)))
        self.seeds = torch.tensor(list(seeds), device=device)
        self.token_ids: list[list[int]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.position = 0
        self.last = torch.zeros(0, dtype=torch.int64)
        self.cache = GrowingCache(layers, len(prompts))
        lengths = [len(prompt) for prompt in prompts]
        self.longest = max(lengths)
        self._mask, self._positions = left_padded_positions(lengths, device)

    @property
    def is_over(self) -> bool:
        """True if all samples have ended."""
        return self.position >= self._max_tokens or all(self.ended)

    def pieces(self, number: int) -> list[slice]:
        """Split the samples into at most `number` slices for prefill."""
        return split_evenly(len(self._prompts), min(number, len(self._prompts)))

    def prompt_ids(self, piece: slice) -> Tensor:
        """Return the prompts of a slice, padded on the left, ``[samples, longest]``."""
        prompts = self._prompts[piece]
        ids = torch.zeros(len(prompts), self.longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, self.longest - len(prompt) :] = prompt
        return ids.to(self._device)

    def places(self, piece: slice = slice(None)) -> tuple[Tensor | None, Tensor]:
        """Return attention mask and positions of the newest tokens of a slice: of its prompts at
        first, then of the last tokens."""
        mask = None if self._mask is None else self._mask[piece]
        return mask, self._positions[piece]

    def take(self, tokens: Tensor) -> None:
        """Append the next token of every row, as encoded by `mark_last_tokens`."""
        said = tokens.tolist()
        for row, token in zip(self.rows, said, strict=True):
            if not self.ended[row]:
                self.token_ids[row].append(token if token >= 0 else -1 - token)
                self.ended[row] = token < 0
        self.position += 1
        self.last = torch.where(tokens < 0, -1 - tokens, tokens)
        if self._mask is not None:
            ones = torch.ones_like(self._mask[:, :1])
            self._mask = torch.cat([self._mask, ones], dim=1)
        self._positions = self._positions[:, -1:] + 1
        alive = [place for place, row in enumerate(self.rows) if not self.ended[row]]
        if alive and len(alive) <= len(self.rows) // 2:  # a long tail runs in a small batch
            keep = torch.tensor(alive, device=self._device)
            self.cache.keep(keep)
            self.rows = [self.rows[place] for place in alive]
            self.seeds, self.last, self._positions = (
                one[keep] for one in (self.seeds, self.last, self._positions)
            )
            self._mask = None if self._mask is None else self._mask[keep]


def mark_last_tokens(tokens: Tensor, ends: Sequence[bool]) -> Tensor:
    """Encode tokens for the other stages: ``-1 - token`` is the last one of its sample."""
    return torch.where(torch.tensor(list(ends), device=tokens.device), -1 - tokens, tokens)

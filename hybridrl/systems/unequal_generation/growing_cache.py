"""A KV cache for a micro-batch, with room taken ahead so that a token is written without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_ROOM = 64
"""Tokens of room that are taken ahead, at least."""


class GrowingCache(Cache):
    """A KV cache of `layers` layers for `rows` samples. Prompts may pass in pieces, some samples at
    a time: see `begin`."""

    def __init__(self, layers: int, rows: int) -> None:
        self.growing = [GrowingCacheLayer(rows) for _ in range(layers)]
        super().__init__(layers=list(self.growing))

    def begin(self, start: int, stop: int) -> None:
        """Start the prefill of the samples from `start` to `stop`."""
        for layer in self.growing:
            layer.piece, layer.length = slice(start, stop), 0

    def whole(self) -> None:
        """End the prefill: the next tokens are those of all samples."""
        for layer in self.growing:
            layer.piece = slice(None)

    def keep(self, rows: Tensor) -> None:
        """Drop all samples but these."""
        for layer in self.growing:
            layer.keep(rows)


class GrowingCacheLayer(CacheLayerMixin):
    """The keys and values ``[samples, heads, tokens, width]`` of one layer."""

    is_sliding = False

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length, self.piece = 0, slice(None)
        self._rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (self._room_for(one, 0) for one in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens and return all keys and values of these samples."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.keys.shape[2]:
            grown = [self._room_for(one, start) for one in (key_states, value_states)]
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[:, :, :start] = old[:, :, :start]
            self.keys, self.values = grown
        found = []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept[self.piece, :, start : self.length] = new
            found.append(kept[self.piece, :, : self.length])
        return found[0], found[1]

    def keep(self, rows: Tensor) -> None:
        """Drop all samples but these."""
        self._rows = len(rows)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def _room_for(self, like: Tensor, tokens: int) -> Tensor:
        """Allocate room for the tokens there are and half as many more, or `_MIN_ROOM`."""
        _, heads, new, width = like.shape
        room = tokens + new + max(_MIN_ROOM, tokens // 2)
        return like.new_empty((self._rows, heads, room, width))


def left_padded_positions(
    lengths: Sequence[int], device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return mask and positions of prompts that are padded on the left to the longest.

    Returns:
        ``[samples, longest]`` each; no mask where all are equally long.
    """
    longest = max(lengths)
    places = torch.arange(longest, device=device)
    missing = longest - torch.tensor(lengths, device=device)[:, None]
    positions = (places - missing).clamp_(min=0)
    mask = None if min(lengths) == longest else (places >= missing).long()
    return mask, positions

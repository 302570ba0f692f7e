"""Ulysses: an exchange of tokens for heads before attention, and back after it.

Outside attention each of N ranks has a part of the tokens with all heads; for attention each gets
all tokens with a part of the heads.

Bytes that a rank with t tokens sends for one attention forward, with H heads and K key-value heads
of size D in a type of b bytes, in four exchanges (of q, k and v, which travel together, and of the
output):

    t (2 H + 2 K) D b (N - 1) / N          K = N where there are fewer key-value heads than ranks

and in its backward the same again; every sum over ranks is the same with all tokens as t.

Source: "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models" (Jacobs et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import ConfigError
from hybridrl.models.linear_map import apply_linear_map
from hybridrl.parallel.collectives import exchange_rows


def check_ulysses_heads(heads: int, key_value_heads: int, ulysses: int) -> None:
    """Raise `ConfigError` for heads that cannot be divided over `ulysses` ranks.

    Args:
        heads: Query heads on a rank; with tensor parallelism, those of one of its shards.
        key_value_heads: Likewise.
    """
    if heads % ulysses:
        raise ConfigError(
            f"`actor.parallel.ulysses` = {ulysses} does not divide the model's {heads} attention "
            "heads on a device. Choose a divisor of it, and use `actor.parallel.ring` for the rest."
        )
    if key_value_heads % ulysses and ulysses % key_value_heads:
        raise ConfigError(
            f"`actor.parallel.ulysses` = {ulysses} neither divides the model's {key_value_heads} "
            "key-value heads on a device nor is a multiple of them. Choose one that does or is, "
            "and use `actor.parallel.ring` for the rest."
        )


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """An exchange of tokens for heads inside a Ulysses group.

    Attributes:
        group: The Ulysses ranks.
        counts: Tokens of each of them; uneven counts and empty ranks are fine.
    """

    group: dist.ProcessGroup
    counts: list[int]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of this rank's heads. Collective.

        Args:
            q: `[this rank's tokens, heads, head_dim]`; k and v have the key-value heads. If there
                are fewer key-value heads than ranks, each goes to several ranks.

        Returns:
            `[all tokens, (heads + 2 * key-value heads) / ranks, head_dim]`: q, k and v.
        """
        ranks = len(self.counts)
        copies = max(1, ranks // k.shape[1])
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        by_rank = [x.unflatten(1, (ranks, x.shape[1] // ranks)) for x in (q, k, v)]
        sent = torch.cat(by_rank, dim=2).transpose(0, 1).flatten(0, 1)
        return self._exchange(sent, [len(q)] * ranks, self.counts)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads, `[all tokens, heads / ranks, head_dim]`, for
        this rank's tokens of all heads, `[this rank's tokens, heads, head_dim]`. Collective."""
        ranks = len(self.counts)
        mine = self.counts[dist.get_rank(self.group)]
        received = self._exchange(x, self.counts, [mine] * ranks)
        return received.unflatten(0, (ranks, mine)).transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to every rank of the group; the gradient goes the other way."""
        there = partial(exchange_rows, sent=sent, received=received, group=self.group)
        back = partial(exchange_rows, sent=received, received=sent, group=self.group)
        return apply_linear_map(x, there, back)

"""Tokens from logits: drawn with a sample's own noise, with the log-probability of what they were
drawn from; and whether a sample ends with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridrl.rollout.noise import gumbel
from hybridrl.rollout.rollout_engine import Sampling

STOP_TOKENS = 32
"""In so many of the last tokens a text that ends a sample is looked for."""


class Chooser:
    """Chooses tokens as `sampling` says.

    Args:
        eos_token_ids: That end a sample, besides those of `sampling`.
        tokenizer: For texts that end one.
    """

    def __init__(
        self, sampling: Sampling, eos_token_ids: Tensor, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._sampling = sampling
        further = eos_token_ids.new_tensor(sampling.stop_token_ids)
        self._eos = torch.cat([eos_token_ids, further])
        self._tokenizer = tokenizer
        self._warpers = _warpers(sampling)

    def choose(self, logits: Tensor, seeds: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The next token of each sample, and its log-probability.

        Args:
            logits: ``[samples, vocabulary]``.
            seeds: Of each sample, ``[samples]`` int64.
            position: How many tokens each has already.

        Returns:
            ``[samples]`` int64 and float32.
        """
        logits = logits.float()
        if position < self._sampling.min_tokens:
            logits[:, self._eos] = -torch.inf
        log_probs = torch.log_softmax(self._warpers(None, logits), dim=-1)
        if self._sampling.temperature == 0:
            tokens = log_probs.argmax(-1, keepdim=True)
        else:
            places = torch.full_like(seeds, position)
            noise = gumbel(seeds, places, log_probs.shape[1])
            tokens = (log_probs + noise).argmax(-1, keepdim=True)
        return tokens.flatten(), log_probs.gather(1, tokens).flatten()

    def ends(self, tokens: Tensor) -> list[bool]:
        """Whether each of these tokens ends a sample by itself."""
        return torch.isin(tokens, self._eos).tolist()

    def stops(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a sample's tokens complete a text that ends it."""
        if not self._sampling.stop:
            return False
        text = self._tokenizer.decode(token_ids[-STOP_TOKENS:], skip_special_tokens=True)
        return any(stop in text for stop in self._sampling.stop)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers

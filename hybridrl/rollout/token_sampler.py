"""A sampler of tokens from logits, with noise that depends on each sample's own seed."""

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

from hybridrl.rollout.engine_requests import SamplingSettings

_STOP_WINDOW_TOKENS = 32
"""In so many of the last tokens a text that ends a sample is looked for."""
_SEED, _PLACE, _TOKEN = 0x632BE59BD9B4E019, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
_FIRST, _SECOND = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_START = 0x6A09E667F3BCC909  # without it all zeros would be mixed to zero
_BITS = 63
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


class TokenSampler:
    """A sampler that draws the next tokens of a batch as `SamplingParams` say.

    Args:
        eos_token_ids: That end a sample, besides those of `sampling`.
        tokenizer: For texts that end one.
    """

    def __init__(
        self, sampling: SamplingSettings, eos_token_ids: Tensor, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._sampling = sampling
        further = eos_token_ids.new_tensor(sampling.stop_token_ids)
        self._eos = torch.cat([eos_token_ids, further])
        self._tokenizer = tokenizer
        self._warpers = _warpers(sampling)

    def choose(self, logits: Tensor, seeds: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Sample the next token of each sample and return it with its log-probability.

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
            noise = gumbel_noise(seeds, places, log_probs.shape[1])
            tokens = (log_probs + noise).argmax(-1, keepdim=True)
        return tokens.flatten(), log_probs.gather(1, tokens).flatten()

    def ends(self, tokens: Tensor) -> list[bool]:
        """Return for each token whether it ends its sample by itself."""
        return torch.isin(tokens, self._eos).tolist()

    def stops(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last tokens of a sample complete a stop text."""
        if not self._sampling.stop:
            return False
        text = self._tokenizer.decode(token_ids[-_STOP_WINDOW_TOKENS:], skip_special_tokens=True)
        return any(stop in text for stop in self._sampling.stop)


def _warpers(sampling: SamplingSettings) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def gumbel_noise(seeds: Tensor, places: Tensor, width: int) -> Tensor:
    """Return standard Gumbel noise, which depends on a sample's seed and the place in it alone:
    however samples are spread over devices and batches, each draws the same. The largest of
    log-probabilities to which it is added is a draw from them (Gumbel 1954, the "Gumbel-max
    trick").

    Args:
        seeds: Of each sample, ``[samples]`` int64.
        places: How many tokens each has already, ``[samples]`` int64.
        width: Size of the vocabulary.

    Returns:
        ``[samples, width]`` float32.
    """
    tokens = torch.arange(width, device=seeds.device)
    rows = _mix(_mix(seeds * _SEED + _START) + places * _PLACE)
    mixed = _mix(rows[:, None] + tokens * _TOKEN)
    return -torch.log(-torch.log1p(-uniform(mixed)))


def uniform(bits: Tensor) -> Tensor:
    """Uniform float32 numbers of random int64 bits, strictly between 0 and 1: from 2**-64 to
    1 - 2**-24, so that the logarithms of a number and of 1 minus it are finite. Float32 is fine
    near 0 and coarse near 1, so it is small numbers that should decide what is rare."""
    return ((_shifted(bits, 64 - _BITS).float() + 0.5) / 2**_BITS).clamp_(max=_BELOW_ONE)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits with multiplications and shifts as in SplitMix64 (Steele et al. 2014)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

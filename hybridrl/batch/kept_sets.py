"""The tokens that top-p, top-k, min-p and a least length left to be chosen from, place by place.

The trainer computes the probability of a sampled token among these, as the sampler did.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

KEPT_SETS = "kept_sets"
"""The column of a row's sets: as `KeptSets.encode` writes them."""


def restricts_sampling(settings: Any) -> bool:
    """Return whether sampling with these settings (`RolloutConfig`, `SamplingSettings`) leaves
    tokens out."""
    return filters_tokens(settings) or settings.min_tokens > 0


def filters_tokens(settings: Any) -> bool:
    """Return whether these settings leave tokens out by their probability."""
    return bool(settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0)


class TokenSet(NamedTuple):
    """The tokens of one place, or those left out there.

    Attributes:
        size: Positive: the number of `ids`, which are kept. Negative: so many `ids` are left out
            of the vocabulary. 0: nothing is left out.
        ids: Token ids.
    """

    size: int
    ids: Sequence[int]


WHOLE_VOCABULARY = TokenSet(0, ())


class KeptSets:
    """The sets of consecutive tokens of a response.

    Attributes:
        counts: Of each token, see `TokenSet`.
        ids: Of all of them, one token after the other.
    """

    def __init__(self) -> None:
        self.counts, self.ids = array("i"), array("i")

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, found: TokenSet, times: int = 1) -> None:
        """Append the set of the next token, or the same one for several tokens."""
        self.counts.extend([found.size] * times)
        self.ids.extend(list(found.ids) * times)

    def extend(self, other: KeptSets) -> None:
        """Append the sets of another response, which continues this one."""
        self.counts += other.counts
        self.ids += other.ids

    def cut(self, tokens: int) -> None:
        """Remove the sets of all tokens but the first so many."""
        removed = sum(map(abs, self.counts[tokens:]))
        del self.counts[tokens:], self.ids[len(self.ids) - removed :]

    def encode(self) -> npt.NDArray[np.int32]:
        """Return the counts, then the ids."""
        return np.concatenate([np.array(part, dtype=np.int32) for part in (self.counts, self.ids)])


def decode_kept_sets(values: torch.Tensor, lengths: Sequence[int]) -> Iterator[KeptSets]:
    """Yield the sets of responses of these lengths that lie in `values` one after the other."""
    for length in lengths:
        found = KeptSets()
        found.counts = array("i", values[:length].tolist())
        end = length + sum(map(abs, found.counts))
        found.ids = array("i", values[length:end].tolist())
        values = values[end:]
        yield found


def find_token_sets(log_probs: torch.Tensor) -> list[TokenSet]:
    """Return the sets of tokens with a probability above 0, by row of `[rows, vocabulary]`."""
    kept = log_probs > -torch.inf
    counts = kept.sum(1)
    is_large = 2 * counts > kept.shape[1]
    listed = (kept ^ is_large[:, None]).nonzero()[:, 1]
    signed = torch.where(is_large, counts - kept.shape[1], counts).tolist()
    parts = listed.cpu().split([abs(count) for count in signed])
    return [TokenSet(count, ids.tolist()) for count, ids in zip(signed, parts, strict=True)]

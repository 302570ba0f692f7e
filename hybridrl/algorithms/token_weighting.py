"""The weight of each token in the loss of a mini-batch.

Weights are computed once, on the global mini-batch, and travel with the tokens. The loss is then a
plain sum, and a sum may be split over micro-batches, ranks and sequence parts in any way without
changing the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.segments import (
    TokenSegments,
    apply_mask,
    check_known_name,
    resolve_segments,
)
from hybridrl.errors import ConfigError

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
)


@torch.no_grad()
def token_weights(
    mask: Tensor,
    mode: str,
    *,
    length_norm: float | None = None,
    segments: TokenSegments | None = None,
) -> Tensor:
    """Compute weights shaped like the mask, such that the loss is ``(weights * loss).sum()``.

    mask: ``[rows, time]``, or packed ``[tokens]`` with ``segments`` telling the rows. Weights
    are float32 (float64 for a float64 mask) and 0 off the mask; an empty mask gives only zeros.

    With n the number of rows that have tokens, a token of a row of l tokens weighs

    * ``token-mean``: 1 / number of tokens (DAPO, arXiv:2503.14476)
    * ``seq-mean-token-mean``: 1 / (n l) (GRPO, arXiv:2402.03300)
    * ``seq-mean-token-sum``: 1 / n
    * ``seq-mean-token-sum-norm``: 1 / (n length_norm) (Dr. GRPO, arXiv:2503.20783)
    * ``token-sum``: 1

    length_norm: the longest allowed response; without it, the time dimension of a padded mask.
    Raises `ConfigError` for an unknown mode, and for packed tokens without ``length_norm`` in
    the mode that needs it: a pack does not tell how long a response might have been.
    """
    check_known_name("mode", mode, AGGREGATION_MODES)
    dtype = torch.float64 if mask.dtype == torch.float64 else torch.float32
    padded = segments is None
    segments = resolve_segments(mask, segments)
    held = segments.mask
    lengths = segments.lengths.to(dtype)
    rows = (lengths > 0).sum().clamp(min=1).to(dtype)

    if mode == "token-mean":
        weight = 1.0 / lengths.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        weight = segments.spread(1.0 / (rows * lengths.clamp(min=1)))
    elif mode == "seq-mean-token-sum":
        weight = 1.0 / rows
    elif mode == "seq-mean-token-sum-norm":
        weight = 1.0 / (rows * _length_norm(held, length_norm, padded))
    else:
        weight = torch.ones_like(rows)
    return apply_mask(weight.expand(held.shape), held)


def _length_norm(mask: Tensor, length_norm: float | None, padded: bool) -> float:
    if length_norm is None and not padded:
        raise ConfigError(
            "`length_norm` is not set, and packed tokens do not tell the longest allowed "
            "response; the mode `seq-mean-token-sum-norm` needs it. Set it to that length."
        )
    if length_norm is None:
        return float(max(mask.shape[-1], 1))
    if length_norm <= 0:
        raise ConfigError(f"`length_norm` is {length_norm}; expected a positive length.")
    return float(length_norm)

"""How much a model's answers change when a matrix product is computed in fewer bits.

Rounding to nearest on a grid of step s adds noise of variance s^2 / 12 to each value. The KL
between the answers before and after is, to second order, half of that noise weighed by the Fisher
information: the expected square of the gradient of log p of tokens that the model itself draws
(Kunstner et al. 2019, arXiv:1905.12558, section 2). For y = W x, over the tokens t of a sample:

    weights       1/24 sum_ij s_ij^2 (d log p / d W_ij)^2
    activations   1/24 sum_t  s_t^2 |d log p / d x_t|^2

With all outputs equally important the first is s_w^2 Var(x), by which LLM-PQ chooses bits (Zhao et
al. 2024, arXiv:2403.01136), and the two are the terms of QSync's bound for 8-bit products,
|v|^2 s_w^2 + |w|^2 s_v^2 (Zhao et al. 2024, arXiv:2407.02327), whose 1/6 is for stochastic
rounding. The sum over a layer's products is its indicator, in nats a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEAREST = 1 / 12
"""Variance of rounding to nearest, in squares of the grid's step."""


def weight_kl(weight: Tensor, gradient: Tensor, largest: int, group: int | None = None) -> float:
    """Nats that rounding a weight adds to the KL of one sample.

    Args:
        weight: ``[outputs, inputs]``.
        gradient: Of the sample's log p by the weight, for tokens drawn from the model.
        largest: Code of the largest value of those that share a scale, such as 127.
        group: Neighbouring inputs that share a scale; None: all of a row.
    """
    size = group or weight.shape[1]
    beyond = (0, -weight.shape[1] % size)
    steps = F.pad(weight.float(), beyond).unflatten(1, (-1, size)).abs().amax(2) / largest
    squares = F.pad(gradient.float(), beyond).unflatten(1, (-1, size)).square().sum(2)
    return float(0.5 * NEAREST * (steps.square() * squares).sum())


def activation_kl(inputs: Tensor, gradient: Tensor, largest: int) -> float:
    """Nats that rounding a product's inputs, token by token, adds to the KL of one sample.

    Args:
        inputs: ``[tokens, inputs]``.
        gradient: Of log p by these inputs, through this product alone.
        largest: Code of a token's largest value.
    """
    steps = inputs.float().abs().amax(1) / largest
    return float(0.5 * NEAREST * (steps.square() * gradient.float().square().sum(1)).sum())


def token_kls(log_probs: Tensor, others: Tensor) -> Tensor:
    """KL(p || q) of each token, ``[tokens]``, of log-probabilities ``[tokens, vocabulary]``."""
    return (log_probs.exp() * (log_probs - others)).sum(1).clamp_min(0)


def sums(indicators: dict[int, dict[int, float]], bits: dict[int, int]) -> float:
    """What the indicators say of a choice ``{layer: bits}`` as a whole: noises of different layers
    do not know of each other, so their sum. Layers and bits that are not named add nothing."""
    return float(torch.tensor([indicators[n].get(b, 0.0) for n, b in bits.items()]).sum())

"""Log-probabilities and entropy of chosen tokens, without ever holding `[tokens, vocabulary]`."""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 22
"""Logits computed at a time: tokens per chunk = this divided by the vocabulary."""


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, in float32.

    Args:
        hidden: `[tokens, hidden]`, the model's last hidden states.
        weight: `[vocabulary, hidden]`, the output embedding.
        targets: `[tokens]`, token ids.
        temperature: The logits are divided by it, as the sampler did.

    Returns:
        log_probs `[tokens]` and entropy `[tokens]`; gradients flow through both.
    """
    return _TokenLogProbs.apply(hidden, weight, targets, temperature)


class _TokenLogProbs(torch.autograd.Function):
    """Computes logits chunk by chunk, twice: once forward, once backward. The second product costs
    a tenth of a layer; the logits it avoids keeping are the largest tensor of the whole step."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        for chunk in _chunks(hidden, weight):
            log_softmax = _log_softmax(hidden[chunk], weight, temperature)
            log_probs[chunk] = log_softmax.gather(1, targets[chunk, None]).squeeze(1)
            entropy[chunk] = -(log_softmax.exp() * log_softmax).sum(1)
        ctx.save_for_backward(hidden, weight, targets, entropy)
        ctx.temperature = temperature
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        hidden, weight, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for chunk in _chunks(hidden, weight):
            log_softmax = _log_softmax(hidden[chunk], weight, ctx.temperature)
            probs = log_softmax.exp()
            # d log p_t / d z = onehot_t - p;  d H / d z = -p (log p + H)
            grad = probs * -grad_log_probs[chunk, None]
            grad.scatter_add_(1, targets[chunk, None], grad_log_probs[chunk, None])
            if with_entropy:
                grad -= grad_entropy[chunk, None] * probs * (log_softmax + entropy[chunk, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[chunk] = grad @ weight
            grad_weight += grad.T @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax((hidden @ weight.T).float() / temperature, dim=1)

"""Log-probabilities and entropy of given tokens, without ever holding `[tokens, vocabulary]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridrl.system.device_traits import has_mm_out_dtype, logits_per_chunk


class VocabularyShard(NamedTuple):
    """The part of the vocabulary on this rank, from `start`; ranks of `group` have the rest."""

    start: int
    group: dist.ProcessGroup


class LogitScale(NamedTuple):
    """The scale by which a head's products become logits.

    Attributes:
        temperature: The capped logits are divided by it, as the sampler did.
        soft_cap: c of `c tanh(x / c)`, by which some models (Gemma) bound their logits; None: no
            bound.
    """

    temperature: float = 1.0
    soft_cap: float | None = None

    def apply(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits, of products that are used up."""
        if self.soft_cap is None:
            return products if self.temperature == 1.0 else products.div_(self.temperature)
        return products.div_(self.soft_cap).tanh_() * (self.soft_cap / self.temperature)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float | None:
        """Return the derivative of logits by the products that they came from; None: 1."""
        if self.soft_cap is None:
            return None if self.temperature == 1.0 else 1 / self.temperature
        return (1 - (logits * (self.temperature / self.soft_cap)).square_()) / self.temperature


def soft_cap_of(config: Any) -> float | None:
    """Return the bound of a language model's logits, from its configuration."""
    cap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return cap


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    vocabulary: VocabularyShard | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each target and the entropy of each distribution, in float32.

    Args:
        hidden: `[tokens, hidden]`, the model's last hidden states.
        weight: `[vocabulary, hidden]`, the output embedding, or this rank's rows of it.
        targets: `[tokens]`, token ids.
        temperature, soft_cap: See `LogitScale`.
        vocabulary: Which rows `weight` holds; None: all.

    Returns:
        log_probs `[tokens]` and entropy `[tokens]`; gradients flow through both.
    """
    scale = LogitScale(temperature, soft_cap)
    return _TokenLogProbs.apply(hidden, weight, targets, scale, vocabulary)


class _TokenLogProbs(torch.autograd.Function):
    """An autograd function that computes logits in chunks, once forward and once backward. The
    second product costs a tenth of a layer; the logits it avoids keeping are the largest tensor of
    the whole step.

    Logits are never rounded to half precision: in the log-probability of a likely token that would
    be the largest error of all (a logit of 20 is rounded by up to 0.06 in bfloat16).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: LogitScale,
        vocabulary: VocabularyShard | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # By token: the largest logit; and, with z the logits less the largest, the sum of exp(z),
        # that of exp(z) z, and the target's z.
        largest = hidden.new_empty(len(hidden), dtype=torch.float32)
        sums = largest.new_empty(len(hidden), 3)
        local, mine = find_local_rows(targets, weight, vocabulary)
        states, table = prepare_operand(hidden), prepare_operand(weight)
        for chunk in split_tokens(hidden, weight):
            logits = compute_logits(states[chunk], table, scale)
            largest[chunk] = logits.amax(1)
            logits -= largest[chunk, None]
            exponentials = logits.exp()
            sums[chunk, 0] = exponentials.sum(1)
            sums[chunk, 1] = exponentials.mul_(logits).sum(1)
            sums[chunk, 2] = logits.gather(1, local[chunk, None]).squeeze(1) * mine[chunk]
            del logits, exponentials  # before the next ones are made
        if vocabulary is not None:
            mine_largest, largest = largest, largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=vocabulary.group)
            shift = mine_largest - largest
            sums[:, 1] += shift * sums[:, 0]
            sums[:, :2] *= shift.exp()[:, None]
            sums[:, 2] += shift * mine
            dist.all_reduce(sums, group=vocabulary.group)
        log_sum = sums[:, 0].log()
        log_probs = sums[:, 2] - log_sum
        entropy = log_sum - sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(hidden, weight, targets, entropy, largest, log_sum)
        ctx.scale, ctx.vocabulary = scale, vocabulary
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, entropy, largest, log_sum = ctx.saved_tensors
        with_entropy = bool(grad_entropy.any())
        local, mine = find_local_rows(targets, weight, ctx.vocabulary)

        def of_logits(chunk: slice, log_softmax: torch.Tensor) -> torch.Tensor:
            probs = log_softmax.exp()
            # d log p_t / d z = onehot_t - p;  d H / d z = -p (log p + H)
            grad = probs * -grad_log_probs[chunk, None]
            own = (grad_log_probs[chunk] * mine[chunk])[:, None]
            grad.scatter_add_(1, local[chunk, None], own)
            if with_entropy:
                terms = log_softmax.add_(entropy[chunk, None]).mul_(probs)
                grad -= terms.mul_(grad_entropy[chunk, None])
            return grad

        grads = compute_head_gradients(
            *(hidden, weight, ctx.scale, ctx.vocabulary, largest, log_sum),
            of_logits,
            with_weight=ctx.needs_input_grad[1],
        )
        return *grads, None, None, None


def compute_head_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    scale: LogitScale,
    vocabulary: VocabularyShard | None,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
    of_logits: Callable[[slice, torch.Tensor], torch.Tensor],
    *,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of hidden states and output embedding, from logits computed once more.

    Args:
        largest, log_sum: `[tokens]`, the largest logit of all, and the logarithm of the sum of
            exp(logit - largest).
        of_logits: From some tokens and their log-softmax, to be used up, the gradient of their
            logits as they are scaled.
        with_weight: Whether that of the embedding is wanted.
    """
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_weight else None
    states, table = prepare_operand(hidden), prepare_operand(weight)
    for chunk in split_tokens(hidden, weight):
        # Less the largest first: it may be large, and the rest is not.
        logits = compute_logits(states[chunk], table, scale)
        slope = scale.slope(logits)
        logits -= largest[chunk, None]
        logits -= log_sum[chunk, None]
        grad = of_logits(chunk, logits)
        grad = (grad if slope is None else grad.mul_(slope)).to(table.dtype)
        del logits, slope  # the products below are large themselves
        grad_hidden[chunk] = (grad @ table).to(hidden.dtype)
        if grad_weight is None:
            pass
        elif table.dtype is torch.float32:
            grad_weight.addmm_(grad.T, states[chunk])
        else:  # summed where it lies: as large as the output embedding in float32
            torch.addmm(
                *(grad_weight, grad.T, states[chunk]), out_dtype=torch.float32, out=grad_weight
            )
        del grad  # the next chunk's logits come before its own
    del table  # perhaps a copy, and another one is made now
    if vocabulary is not None:
        dist.all_reduce(grad_hidden, group=vocabulary.group)
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def find_local_rows(
    targets: torch.Tensor, weight: torch.Tensor, vocabulary: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's row in `weight`, 0 if another rank has it, and whether this rank has it."""
    local = targets if vocabulary is None else targets - vocabulary.start
    mine = (local >= 0) & (local < len(weight))
    return torch.where(mine, local, 0), mine


def split_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Split tokens into chunks whose logits fit into memory at once."""
    size = max(1, logits_per_chunk(weight.device.type) // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def prepare_operand(matrix: torch.Tensor) -> torch.Tensor:
    """Return `matrix` in the form that `_product` takes. Where the device cannot sum half-precision
    products in float32, this is a float32 copy, made once for all chunks: as large as the gradient
    that the backward sums."""
    is_half = matrix.dtype in (torch.bfloat16, torch.float16)
    return matrix if is_half and has_mm_out_dtype(matrix.device.type) else matrix.float()


def compute_logits(states: torch.Tensor, table: torch.Tensor, scale: LogitScale) -> torch.Tensor:
    """Compute float32 logits `[tokens, vocabulary]` from operands of `prepare_operand`."""
    return scale.apply(_product(states, table.T))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b`, summed and given in float32."""
    if a.dtype is torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)

"""Log-probabilities and entropy of given tokens, without ever holding `[tokens, vocabulary]`."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridrl.models.kept_tokens import KeptTokens
from hybridrl.system.device_traits import has_mm_out_dtype, has_triton, logits_per_chunk

_LEFT_OUT = -1e20
"""The logit of a token that could not be chosen; unlike minus infinity it has differences."""


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
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each target and the entropy of each distribution, in float32.

    Args:
        hidden: `[tokens, hidden]`, the model's last hidden states.
        weight: `[vocabulary, hidden]`, the output embedding, or this rank's rows of it.
        targets: `[tokens]`, token ids.
        temperature, soft_cap: See `LogitScale`.
        vocabulary: Which rows `weight` holds; None: all.
        kept: Which tokens each distribution is over; None: all.

    Returns:
        log_probs `[tokens]` and entropy `[tokens]`; gradients flow through both.
    """
    scale = LogitScale(temperature, soft_cap)
    return _TokenLogProbs.apply(hidden, weight, targets, scale, vocabulary, kept)


class _TokenLogProbs(torch.autograd.Function):
    """An autograd function that computes logits in parts, once forward and once backward. The
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
        kept: KeptTokens | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks, blocks = split_logits(len(hidden), weight)
        # By block of the vocabulary and token: the largest logit; and, with z the logits less the
        # largest, the sums of exp(z) and of exp(z) z.
        largest = hidden.new_empty(len(blocks), len(hidden), dtype=torch.float32)
        sums = largest.new_empty(*largest.shape, 2)
        chosen = largest.new_zeros(len(hidden), 1)  # the target's logit
        states = prepare_operand(hidden)
        for part, block in enumerate(blocks):
            table = prepare_operand(weight[block])
            for chunk in chunks:
                products = compute_products(states[chunk], table.T)
                local, mine = find_local_rows(targets[chunk, None], block, vocabulary)
                chosen[chunk] += scale.apply(products.gather(1, local)) * mine
                left_out = find_left_out(kept, chunk, block, vocabulary)
                found = _sum_exponentials(products, scale, left_out)
                largest[part, chunk], sums[part, chunk] = found
                del products, left_out  # before the next ones are made
        most = largest.amax(0)
        sums = _shift(sums, largest - most).sum(0)
        if vocabulary is not None:
            largest, most = most, most.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, group=vocabulary.group)
            sums = torch.cat([_shift(sums, largest - most), chosen], 1)
            dist.all_reduce(sums, group=vocabulary.group)
            chosen = sums[:, 2:]
        log_sum = sums[:, 0].log()
        log_probs = chosen.squeeze(1) - most - log_sum
        entropy = log_sum - sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(hidden, weight, targets, most, log_sum, entropy)
        ctx.scale, ctx.vocabulary, ctx.kept = scale, vocabulary, kept
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, *of_tokens = ctx.saved_tensors
        largest, log_sum, entropy = of_tokens
        nothing = torch.zeros_like(log_sum)
        of_log_prob = nothing if grad_log_probs is None else grad_log_probs
        of_tokens += [of_log_prob, nothing if grad_entropy is None else grad_entropy]

        def of_products(chunk: slice, block: slice, products: torch.Tensor) -> torch.Tensor:
            local, mine = find_local_rows(targets[chunk, None], block, ctx.vocabulary)
            left_out = find_left_out(ctx.kept, chunk, block, ctx.vocabulary)
            if _runs_kernels(products, ctx.scale, left_out):
                from hybridrl.models.head_kernels import differentiate_log_probs

                places = torch.where(mine, local, -1)
                parts = [x[chunk] for x in of_tokens]
                return differentiate_log_probs(products, weight.dtype, places, parts, *ctx.scale)

            def of_logits(log_softmax: torch.Tensor) -> torch.Tensor:
                # d log p_t / d z = onehot_t - p;  d H / d z = -p (log p + H)
                own = of_log_prob[chunk, None]
                if grad_entropy is None:
                    grad = log_softmax.exp_().mul_(-own)
                else:
                    probs = log_softmax.exp()
                    grad = log_softmax.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
                    grad = grad.add_(own).mul_(probs).neg_()
                return grad.scatter_add_(1, local, own * mine)

            return differentiate_logits(
                products, ctx.scale, largest[chunk], log_sum[chunk], of_logits, left_out
            )

        grads = compute_head_gradients(
            hidden, weight, ctx.vocabulary, of_products, with_weight=ctx.needs_input_grad[1]
        )
        return *grads, None, None, None, None


def find_left_out(
    kept: KeptTokens | None, tokens: slice, rows: slice, vocabulary: VocabularyShard | None
) -> torch.Tensor | None:
    """Return `[tokens, rows]`, which of these rows of this rank's embedding stand for a token that
    could not be chosen; None: all could."""
    if kept is None:
        return None
    start = 0 if vocabulary is None else vocabulary.start
    return kept.find_left_out(tokens, start + rows.start, start + rows.stop)


def _runs_kernels(products: torch.Tensor, scale: LogitScale, left_out: torch.Tensor | None) -> bool:
    """Return whether the Triton kernels take these products, which then lack what is left out."""
    if not has_triton(products.device.type):
        return False
    if left_out is not None:
        if scale.soft_cap is not None:
            return False  # it would bound what is left out as well
        products.masked_fill_(left_out, _LEFT_OUT)
    return True


def _sum_exponentials(
    products: torch.Tensor, scale: LogitScale, left_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each token, and `[tokens, 2]`: with z the logits less the
    largest, the sums of exp(z) and of exp(z) z. The products are used up."""
    if _runs_kernels(products, scale, left_out):
        from hybridrl.models.head_kernels import sum_exponentials

        return sum_exponentials(products, *scale)
    logits = scale.apply(products)
    if left_out is not None:
        logits.masked_fill_(left_out, _LEFT_OUT)
    largest = logits.amax(1)
    logits -= largest[:, None]
    exponentials = logits.exp()
    total = exponentials.sum(1)
    return largest, torch.stack([total, exponentials.mul_(logits).sum(1)], 1)


def _shift(sums: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the sums of exp(z) and of exp(z) z for logits that are all larger by `shift`."""
    total, weighted = sums.unbind(-1)
    return torch.stack([total, weighted + shift * total], -1) * shift.exp()[..., None]


def compute_head_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    vocabulary: VocabularyShard | None,
    of_products: Callable[[slice, slice, torch.Tensor], torch.Tensor],
    *,
    with_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of hidden states and output embedding, from logits computed once more.

    Args:
        of_products: From a slice of tokens, one of the rows of `weight`, and the products of the
            two, to be used up, the gradient of the products.
        with_weight: Whether that of the embedding is wanted.
    """
    # Summed in float32 where it lies: by token over all blocks, by row of a block over its chunks.
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    grad_weight = torch.empty_like(weight) if with_weight else None
    chunks, blocks = split_logits(len(hidden), weight)
    states = prepare_operand(hidden)
    for block in blocks:
        table = prepare_operand(weight[block])
        grad_rows = torch.zeros_like(table, dtype=torch.float32)
        for chunk in chunks:
            grad = of_products(chunk, block, compute_products(states[chunk], table.T)).to(
                table.dtype
            )
            _add_product(grad_hidden[chunk], grad, table)
            if grad_weight is not None:
                _add_product(grad_rows, grad.T, states[chunk])
            del grad  # the next logits come before their own
        if grad_weight is not None:
            grad_weight[block] = grad_rows
    grad_hidden = grad_hidden.to(hidden.dtype)
    if vocabulary is not None:
        dist.all_reduce(grad_hidden, group=vocabulary.group)
    return grad_hidden, grad_weight


def differentiate_logits(
    products: torch.Tensor,
    scale: LogitScale,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
    of_logits: Callable[[torch.Tensor], torch.Tensor],
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of products, which are used up.

    Args:
        largest, log_sum: `[tokens]`, the largest logit of all, and the logarithm of the sum of
            exp(logit - largest).
        of_logits: From the log-softmax, to be used up, the gradient of the logits.
        left_out: `[tokens, rows]`, which logits count for nothing.
    """
    logits = scale.apply(products)
    slope = scale.slope(logits)
    if left_out is not None:
        logits.masked_fill_(left_out, _LEFT_OUT)
    # Less the largest first: it may be large, and the rest is not.
    logits -= largest[:, None]
    logits -= log_sum[:, None]
    grad = of_logits(logits)
    return grad if slope is None else grad.mul_(slope)


def find_local_rows(
    ids: torch.Tensor, rows: slice, vocabulary: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's place among these rows of this rank's embedding, 0 if it is not there, and
    whether it is."""
    local = ids - rows.start - (0 if vocabulary is None else vocabulary.start)
    mine = (local >= 0) & (local < rows.stop - rows.start)
    return torch.where(mine, local, 0), mine


def split_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Split tokens into chunks whose logits of the whole vocabulary fit into memory at once."""
    return _slices(len(hidden), logits_per_chunk(weight.device.type) // len(weight))


def split_logits(tokens: int, weight: torch.Tensor) -> tuple[list[slice], list[slice]]:
    """Split tokens into chunks and the rows of `weight` into blocks, so that the logits of a chunk
    and a block fit into memory at once."""
    kind = weight.device.type
    rows = vocabulary_block_size(tokens, len(weight), kind)
    return _slices(tokens, logits_per_chunk(kind) // rows), _slices(len(weight), rows)


def vocabulary_block_size(tokens: int, vocabulary: int, kind: str) -> int:
    """Return the number of rows of the embedding whose logits are computed at once, for all tokens
    or for as many as rows: a product reads states and rows, and its gradients write them, so both
    should be many."""
    limit = logits_per_chunk(kind)
    return min(vocabulary, max(isqrt(limit), limit // max(1, tokens)))


def _slices(length: int, size: int) -> list[slice]:
    starts = range(0, length, max(1, size))
    return [slice(start, min(start + starts.step, length)) for start in starts]


def prepare_operand(matrix: torch.Tensor) -> torch.Tensor:
    """Return `matrix` in the form that `compute_products` takes: a float32 copy where the device
    cannot sum half-precision products in float32."""
    is_half = matrix.dtype in (torch.bfloat16, torch.float16)
    return matrix if is_half and has_mm_out_dtype(matrix.device.type) else matrix.float()


def compute_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b`, of operands of `prepare_operand`, summed and given in float32."""
    if a.dtype is torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to a float32 matrix, where it lies."""
    if a.dtype is torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)

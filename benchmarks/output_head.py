"""Log-probabilities and entropy of a large vocabulary, forward and backward, against the same by
chunks of tokens with all logits of each.

    python benchmarks/output_head.py                # a vocabulary of 151,936, in both precisions
    python benchmarks/output_head.py --forward      # without a backward, as a reference scores

A chunk holds as many logits as ours do, so few tokens that the whole embedding and its gradient
pass by for each. The arms take turns. Peaks of memory are those of a process for each arm.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import interleave, report
from torch import Tensor

from hybridrl.models.log_probs import token_log_probs
from hybridrl.system.device_traits import logits_per_chunk, synchronize_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    """Prints a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-of", choices=["ours", "chunks"], help="prints that arm's peak only")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in chosen.dtypes:
        if chosen.peak_of:
            arm(ARMS[chosen.peak_of], chosen, dtype)()
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            continue
        ours, chunks = (arm(work, chosen, dtype) for work in ARMS.values())
        (ours(), chunks())
        name = f"head_{'forward_' if chosen.forward else ''}{dtype}"
        report(name, *interleave(ours, chunks, chosen.rounds), "<= 0.77", "s")
        report(f"{name}_peak", *(peak(one, dtype) for one in ARMS), "<= 1", "bytes")


def arm(work: Callable[..., tuple[Tensor, Tensor]], chosen: Any, dtype: str) -> Callable[[], float]:
    """What runs `work` once and gives its seconds."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    shapes = (chosen.tokens, chosen.hidden), (chosen.vocabulary, chosen.hidden)
    scale = chosen.hidden**-0.25  # so that logits are as far apart as states and weights
    states, weight = (
        torch.randn(shape, generator=generator).mul_(scale).to(device, DTYPES[dtype])
        for shape in shapes
    )
    targets = torch.randint(chosen.vocabulary, (chosen.tokens,), generator=generator).to(device)
    for leaf in (states, weight):
        leaf.requires_grad_(not chosen.forward)

    def once() -> float:
        states.grad = weight.grad = None
        begin = time.perf_counter()
        log_probs, _ = work(states, weight, targets)
        if not chosen.forward:
            log_probs.sum().backward()
        synchronize_device(device)
        return time.perf_counter() - begin

    return once


def peak(name: str, dtype: str) -> float:
    """The peak of a process with one arm only."""
    further = [*sys.argv[1:], "--peak-of", name, "--dtypes", dtype]
    done = subprocess.run(
        [sys.executable, __file__, *further], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def by_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The baseline."""
    return _ByChunks.apply(hidden, weight, targets)


class _ByChunks(torch.autograd.Function):
    """As `hybridrl.models.log_probs` was before 2026-11-26."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        largest = hidden.new_empty(len(hidden), dtype=torch.float32)
        sums = largest.new_empty(len(hidden), 3)
        states, table = _operand(hidden), _operand(weight)
        for chunk in _chunks(hidden, weight):
            logits = _product(states[chunk], table.T)
            largest[chunk] = logits.amax(1)
            logits -= largest[chunk, None]
            exponentials = logits.exp()
            sums[chunk, 0] = exponentials.sum(1)
            sums[chunk, 1] = exponentials.mul_(logits).sum(1)
            sums[chunk, 2] = logits.gather(1, targets[chunk, None]).squeeze(1)
            del logits, exponentials
        log_sum = sums[:, 0].log()
        entropy = log_sum - sums[:, 1] / sums[:, 0]
        ctx.save_for_backward(hidden, weight, targets, entropy, largest, log_sum)
        return sums[:, 2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets, entropy, largest, log_sum = ctx.saved_tensors
        with_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        states, table = _operand(hidden), _operand(weight)
        for chunk in _chunks(hidden, weight):
            logits = _product(states[chunk], table.T)
            logits -= largest[chunk, None]
            logits -= log_sum[chunk, None]
            probs = logits.exp()
            found = probs * -grad[chunk, None]
            found.scatter_add_(1, targets[chunk, None], grad[chunk, None])
            if with_entropy:
                terms = logits.add_(entropy[chunk, None]).mul_(probs)
                found -= terms.mul_(grad_entropy[chunk, None])
            del logits, probs
            half = found.to(table.dtype)
            del found
            grad_hidden[chunk] = (half @ table).to(hidden.dtype)
            if table.dtype is torch.float32:
                grad_weight.addmm_(half.T, states[chunk])
            else:
                torch.addmm(
                    grad_weight, half.T, states[chunk], out_dtype=torch.float32, out=grad_weight
                )
            del half
        return grad_hidden, grad_weight.to(weight.dtype), None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, logits_per_chunk(weight.device.type) // len(weight))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _operand(matrix: Tensor) -> Tensor:
    return matrix.float() if matrix.device.type == "cpu" else matrix


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.dtype is torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


ARMS = {"ours": token_log_probs, "chunks": by_chunks}

if __name__ == "__main__":
    main()

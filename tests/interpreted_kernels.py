"""Whether the kernels of compress/ give the bits of the reference, and those of the output head the
numbers of torch, in Triton's interpreter.

A program, for the interpreter has to be chosen before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from hybridrl.compress.group_kernels import decode_groups, encode_groups
from hybridrl.compress.grouped_integers import GroupedIntegerCodec
from hybridrl.models import head_kernels, log_probs

CODECS = [
    *(
        GroupedIntegerCodec(8, 2048),
        GroupedIntegerCodec(8, 64, hadamard=True),
        GroupedIntegerCodec(4, 32),
    ),
    *(GroupedIntegerCodec(4, 128, hadamard=True), GroupedIntegerCodec(4, 4096)),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def odd_values(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Of many magnitudes, with zeros, numbers that almost are, halves, and some that are none."""
    normal, spread = torch.randn(2, numel, generator=generator)
    values = normal * torch.exp(5 * spread)
    for begin in range(0, numel, 311):
        part = values[begin : begin + 150]
        kind = int(torch.randint(7, (), generator=generator))
        if kind == 0:
            part.zero_()
        elif kind == 1:
            part.mul_(1e-38)
        elif kind == 2:
            part.copy_((part * 2).round().clamp(-14, 14) / 2)
        elif kind == 3:
            part.mul_(1e30)
        elif kind == 4:
            part[-1] = (float("nan"), float("inf"), float("-inf"))[begin % 3]
    return values


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The bits, but for those of a NaN."""
    bits = (one.nan_to_num(nan=7.0).view(torch.uint8) for one in (ours, theirs))
    return torch.equal(*bits) and ours.isnan().equal(theirs.isnan())


def check_head(generator: torch.Generator) -> None:
    """The same twice, by the kernels and by torch; a vocabulary in several blocks, rows in several
    steps, and logits far from zero."""
    log_probs.logits_per_chunk = lambda _: 150
    head_kernels._COLUMNS_PER_STEP = 16
    for case in range(40):
        tokens, vocabulary, hidden = (
            int(torch.randint(1, most, (), generator=generator)) for most in (9, 70, 6)
        )
        scale = ((1.0, None), (0.7, None), (1.3, 5.0))[case % 3]
        states = torch.randn(tokens, hidden, generator=generator) * 10 ** (case % 4 - 1)
        weight = torch.randn(vocabulary, hidden, generator=generator)
        targets = torch.randint(vocabulary, (tokens,), generator=generator)
        factors = torch.randn(2, tokens, generator=generator)
        found = []
        for by_kernels in (True, False):
            log_probs.has_triton = lambda _, by_kernels=by_kernels: by_kernels
            inputs = states.clone().requires_grad_(), weight.clone().requires_grad_()
            outputs = log_probs.token_log_probs(*inputs, targets, scale[0], soft_cap=scale[1])
            loss = sum((factor * out).sum() for factor, out in zip(factors, outputs, strict=True))
            found.append([*outputs, *torch.autograd.grad(loss, inputs)])
        for one, other in zip(*found, strict=True):
            bound = 3e-5 * max(1.0, float(other.abs().max()))
            assert float((one - other).abs().max()) <= bound, f"case {case}: {one} for {other}"


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    check_head(generator)
    for codec in CODECS:
        sizes = [1, 33, *torch.randint(34, 6000, (3,), generator=generator).tolist()]
        for at, numel in enumerate(sizes):
            dtype = DTYPES[at % 3]
            values = odd_values(numel, generator).to(dtype)
            # The interpreter reads bfloat16 of such a size wrongly.
            values[values.abs() < torch.finfo(dtype).tiny] = 0
            wanted = codec.encode(values)
            groups = -(-numel // codec.group)
            scales = torch.full((groups,), 5.0)
            codes = torch.full((len(wanted) - 4 * groups,), 0x5A, dtype=torch.uint8)
            encode_groups(values, scales, codes, codec.largest, **codec.kind())
            case = f"{codec}, {numel} values of {dtype}"
            assert same(scales, wanted[: 4 * groups].view(torch.float32)), f"scales of {case}"
            assert codes.equal(wanted[4 * groups :]), f"codes of {case}"
            for dtype in DTYPES:
                decoded = torch.full((numel,), 5.0, dtype=dtype)
                decode_groups(decoded, scales, codes, **codec.kind())
                assert same(decoded, codec.decode(wanted, numel, dtype)), f"{dtype} of {case}"


main()

"""What codecs cost and lose: bytes, relative errors, and speed beside a plain copy.

    python benchmarks/codecs.py [--values 4194304] [--rounds 7]

Errors are |decoded - given| / |given| over a tensor of normal numbers and over a heavy-tailed one
(normal times exp of normal, as gradients are), and stand beside those of rounding to bfloat16.
Speeds are of float32 values in or out, on a GPU if there is one, else on one core: there in seconds
of the processor, which do not count what else runs on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from figures import interleave, report
from other_codecs import Codec, GroupedFloat8, TopK

from hybridrl.compress.grouped_integers import GroupedIntegerCodec
from hybridrl.system.device_traits import synchronize_device

CODECS: dict[str, Codec] = {
    "int8, group 2048": GroupedIntegerCodec(8, 2048),
    "int8, group 512": GroupedIntegerCodec(8, 512),
    "int4, group 2048": GroupedIntegerCodec(4, 2048),
    "int4, group 128": GroupedIntegerCodec(4, 128),
    "int4, group 128, Hadamard": GroupedIntegerCodec(4, 128, hadamard=True),
    "float8, group 128": GroupedFloat8(128),
    "top 1%": TopK(0.01),
}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of this work alone."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize_device(device)
    begin = clock()
    work()
    synchronize_device(device)
    return clock() - begin


def relative_error(decoded: torch.Tensor, values: torch.Tensor) -> float:
    """Of the whole tensor, by norms."""
    return ((decoded.double() - values.double()).norm() / values.double().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    normal, spread = torch.randn(2, arguments.values, device=device)
    tensors = {"normal": normal, "heavy-tailed": normal * spread.exp()}
    numel, copy = arguments.values, torch.empty_like(normal)
    gigabytes = normal.nbytes / 1e9

    def copying() -> float:
        return seconds(lambda: copy.copy_(normal), device)

    for name, codec in CODECS.items():
        size = codec.size(numel)
        report(f"codecs/{name}/bytes", size / numel, 2, "", "bytes per value, bfloat16's")
        for kind, values in tensors.items():
            decoded = codec.decode(codec.encode(values), numel, torch.float32)
            error, rounding = (
                relative_error(decoded, values),
                relative_error(values.bfloat16(), values),
            )
            report(f"codecs/{name}/error, {kind}", error, rounding, "", "relative, bfloat16's")
        out = torch.empty(size, dtype=torch.uint8, device=device)
        ways = {
            "encode": lambda codec=codec, out=out: codec.encode(normal, out),
            "decode": lambda codec=codec, out=out: codec.decode(out, numel, torch.float32),
        }
        for way, work in ways.items():
            work()
            ours, plain = interleave(
                lambda work=work: seconds(work, device), copying, arguments.rounds
            )
            report(
                f"codecs/{name}/{way}", gigabytes / ours, gigabytes / plain, "", "GB/s, a copy's"
            )


if __name__ == "__main__":
    main()

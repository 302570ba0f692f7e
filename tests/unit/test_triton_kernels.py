"""Triton kernels: those of codecs give the reference's bits, those of the output head the numbers
of torch, and all become machine code of the GPUs that jobs run on. No GPU is needed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import few_of

from hybridrl.compress.grouped_integers import GroupedIntegerCodec

triton = pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]
CODECS = [
    GroupedIntegerCodec(8, 512),
    GroupedIntegerCodec(4, 128, hadamard=True),
    GroupedIntegerCodec(4, 512),
]
OF_CODECS = {"values": "*bf16", "scales": "*fp32", "codes": "*u8", "numel": "i32"}
OF_TOKENS = ("largest", "log_sum", "entropy", "of_log_prob", "of_entropy")
OF_HEAD = {"columns": "i32", "temperature": "fp32", "soft_cap": "fp32"}


@pytest.mark.more
def test_kernels_give_what_torch_gives_in_the_interpreter():
    program = [sys.executable, "-W", "ignore::RuntimeWarning", "interpreted_kernels.py"]
    path = {"PYTHONPATH": str(TESTS.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, cwd=TESTS, env=path)
    assert done.returncode == 0, done.stderr


def compiled(kernel, signature, constants, capability, **options):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    return made.asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "codec"),
    few_of([(c, codec) for c in (80, 90, 100) for codec in CODECS], [], True),
)
def test_kernels_of_codecs_compile_and_fuse_nothing(capability, codec, monkeypatch, tmp_path):
    from hybridrl.compress import group_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows, _ = group_kernels._programs(1, codec.group)
    constants = {"ROWS": rows, **codec.kind()}
    for kernel, values, own in (
        (group_kernels._encode, "*bf16", {"LARGEST": float(codec.largest)}),
        (group_kernels._decode, "*i16", {"BFLOAT16": True}),
    ):
        ptx = compiled(
            *(kernel, OF_CODECS | {"values": values}, constants | own, capability),
            enable_fp_fusion=False,
        )
        # Rounded once more or less, or flushed to zero, a value would get other bits.
        assert not re.search(r"fma|\.ftz|div\.full|\.approx", ptx)


@pytest.mark.more
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("capped", [False, True])
def test_kernels_of_the_output_head_compile(capability, capped, monkeypatch, tmp_path):
    from hybridrl.models import head_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"CAPPED": capped, "STEP": head_kernels._COLUMNS_PER_STEP}
    numbers = {"products": "*fp32", "largest": "*fp32", "sums": "*fp32", **OF_HEAD}
    compiled(head_kernels._sum_exponentials, numbers, constants, capability)
    for gradient in ("*fp32", "*bf16", "*fp16"):
        numbers = {"products": "*fp32", "gradient": gradient, "targets": "*i64"}
        numbers |= dict.fromkeys(OF_TOKENS, "*fp32") | OF_HEAD
        compiled(head_kernels._differentiate, numbers, constants, capability)

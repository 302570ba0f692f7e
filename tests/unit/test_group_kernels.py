"""Triton kernels of codecs: the reference's bits, and machine code that keeps to them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.compress.grouped_integers import GroupedIntegerCodec

triton = pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]


@pytest.mark.more
def test_kernels_give_the_bits_of_the_reference():
    program = [sys.executable, "-W", "ignore::RuntimeWarning", "interpreted_kernels.py"]
    path = {"PYTHONPATH": str(TESTS.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, cwd=TESTS, env=path)
    assert done.returncode == 0, done.stderr


def test_kernels_compile_for_a_gpu_and_fuse_nothing(monkeypatch, tmp_path):
    """For compute capability 8.0. No GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hybridrl.compress import group_kernels

    codec = GroupedIntegerCodec(4, 128, hadamard=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"values": "*bf16", "scales": "*fp32", "codes": "*u8", "numel": "i32"}
    constants = {"ROWS": 2, **codec.kind()}
    for kernel, own in (
        (group_kernels._encode, {"LARGEST": codec.largest}),
        (group_kernels._decode, {"BFLOAT16": True}),
    ):
        signature = pointers | dict.fromkeys(constants | own, "constexpr")
        if kernel is group_kernels._decode:
            signature["values"] = "*i16"
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants | own)
        options = {"enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
        # Rounded once more or less, or flushed to zero, a value would get other bits.
        assert made.asm["cubin"] and not re.search(r"fma|\.ftz|div\.full|\.approx", made.asm["ptx"])

"""Between the first layer and the last the host never waits for the device: it runs ahead, or the
device is idle while it catches up."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hybridrl"
LAYERS = [
    *("models/packed_attention.py", "models/log_probs.py", "models/packed_models.py"),
    "models/packed_samples.py",
    *("models/flash_attention.py", "models/head_kernels.py", "models/teacher_kl.py"),
    "models/prompt_trees.py",
    *("parallel/block_attention.py", "parallel/collectives.py"),
    *("parallel/fsdp.py", "parallel/padded_attention.py", "parallel/ring_attention.py"),
    *("parallel/sequence_parallel.py", "parallel/staged_model.py", "parallel/tensor_parallel.py"),
    "parallel/ulysses.py",
]
"""What runs inside a model's forward and backward."""
WAITS = {"item", "tolist", "cpu", "nonzero", "numpy", "masked_select", "unique", "synchronize"}
"""Methods whose result depends on the values of a tensor, which the host has to have."""
ALLOWED = {
    ("models/packed_samples.py", "of"): "on the host, before the model runs",
    ("models/packed_samples.py", "buckets"): "lengths are on the host",
    ("models/packed_samples.py", "_routes"): "on the host, before the model runs",
    ("models/packed_samples.py", "_read_by_token"): "on the host, before the model runs",
    **{
        ("models/prompt_trees.py", name): "lengths are on the host"
        for name in ("of", "prompt_case", "split_row")
    },
    ("parallel/block_attention.py", "between"): "lengths are on the host",
    ("parallel/block_attention.py", "of_ranges"): "lengths are on the host",
    ("parallel/block_attention.py", "flash_case"): "lengths are on the host",
    ("parallel/block_attention.py", "_indices"): "lengths are on the host",
    (
        "parallel/collectives.py",
        "all_gather_distinct",
    ): "what ranks tell each other first",
    ("parallel/padded_attention.py", "make_rectangles"): "lengths are on the host",
    ("parallel/sequence_parallel.py", "split"): "once for a micro-batch, before the model runs",
    ("parallel/sequence_parallel.py", "of"): "on the host, before the model runs",
}
"""Where it is right all the same, and why."""


def waits_of(tree):
    """Functions, each with what in it may wait."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute):
                to_host = node.func.attr == "to" and "'cpu'" in ast.unparse(node)
                if node.func.attr in WAITS or to_host:
                    yield function.name, ast.unparse(node)
                if node.func.attr == "repeat_interleave" and len(node.args) == 1:
                    sized = {word.arg for word in node.keywords} & {"output_size", "dim"}
                    if not sized:
                        yield function.name, ast.unparse(node)
            is_number = isinstance(node.func, ast.Name) and node.func.id in ("int", "float", "bool")
            if is_number and isinstance(node.args[0], ast.Call | ast.Subscript):
                yield function.name, ast.unparse(node)
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.While) and any(
                word in ast.unparse(node.test) for word in (".any()", ".all()", ".max()", ".sum()")
            ):
                yield function.name, f"if {ast.unparse(node.test)}"


def test_no_layer_makes_the_host_wait():
    found = {}
    for file in LAYERS:
        for function, what in waits_of(ast.parse((ROOT / file).read_text())):
            found.setdefault((file, function), what)
    unexpected = {place: what for place, what in found.items() if place not in ALLOWED}
    assert not unexpected, (
        "These make the host wait for the device in the middle of a model. Work them out before it "
        f"runs, or say in ALLOWED why they do not: {unexpected}"
    )
    assert not ALLOWED.keys() - found.keys(), "reasons for what is no longer there"


LAYERS_THAT_RUN = """
import sys
import torch
from simulated import DEVICE, Accelerator
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.packed_attention import causal_attention
from hybridrl.models.packed_samples import PackingMetadata

dtype = getattr(torch, sys.argv[1])
def on_device(*shape):
    return torch.empty(*shape, dtype=dtype, device=DEVICE, requires_grad=True)
with Accelerator() as device, device.phase("layers") as seen:
    packing = PackingMetadata.of(torch.tensor([0, 4, 10]), DEVICE)
    q, k, sinks = on_device(10, 4, 8), on_device(10, 2, 8), on_device(4)
    for window in (None, 3):
        for of_heads in (None, sinks):
            causal_attention(q, k, k, packing, None, window, of_heads).sum().backward()
    targets = torch.empty(10, dtype=torch.int64, device=DEVICE)
    found, entropy = token_log_probs(on_device(10, 16), on_device(1000, 16), targets)
    (found - entropy).sum().backward()
print(seen.waits, "buckets" in vars(packing))
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("dtype", "seen"),
    [("bfloat16", "0 False"), ("float32", "0 True")],
)
def test_attention_and_the_head_do_not_wait(dtype, seen):
    """On an accelerator that is not there, in a process of its own: sinks take the flash kernel,
    too, and float32 takes rectangles."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(ROOT.parent), str(tests)])
    done = subprocess.run(
        [sys.executable, "-c", LAYERS_THAT_RUN, dtype],
        **{"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True},
    )
    assert done.stdout.strip() == seen, done.stderr


def test_what_waits_is_recognised():
    waiting = """
def layer(x, lengths):
    x.sum().item()
    bool(x.any())
    lengths.repeat_interleave(lengths)
    if x.any():
        pass
    x.to("cpu")
"""
    fine = """
def layer(x, lengths):
    x.repeat_interleave(2, dim=1)
    lengths.repeat_interleave(lengths, output_size=8)
    int(3)
    x.to(x.device)
"""
    assert len(list(waits_of(ast.parse(waiting)))) == 5
    assert not list(waits_of(ast.parse(fine)))

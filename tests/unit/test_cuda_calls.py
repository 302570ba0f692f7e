"""What only an accelerator reaches is called as the installed torch, vLLM and Python have it: an
upgrade breaks a test here, not a job."""

import ast
import importlib.util
import inspect
from functools import cache
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

from hybridrl.models.packed_attention import _flash_attention, causal_attention
from hybridrl.models.packed_models import PackingMetadata
from hybridrl.parallel.block_attention import AttentionBlock, _flash_backward, _flash_forward
from hybridrl.parallel.zigzag import split_over_ring
from hybridrl.system.device_traits import COLLECTIVE_BACKENDS

ROOT = Path(__file__).parents[2] / "hybridrl"
META = torch.device("meta")
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def calls(file, name):
    """The calls of `name` in a file of ours."""
    found = [
        node
        for node in ast.walk(tree_of(ROOT / file))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]
    assert found, f"{file} no longer calls {name}"
    return found


def keywords(call):
    return {word.arg for word in call.keywords if word.arg is not None}


@cache
def vllm_class(module, name):
    """A class of vLLM's, which is not imported."""
    path = Path(importlib.util.find_spec("vllm").origin).parent / module
    classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    return next(node for node in classes if node.name == name)


def method(of_class, name):
    return next(
        node
        for node in of_class.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    )


def parameters(function):
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def fields(of_class):
    return {node.target.id for node in of_class.body if isinstance(node, ast.AnnAssign)}


# torch


def test_attention_of_packed_samples_is_called_as_torch_has_it():
    (call,) = calls("models/packed_attention.py", "varlen_attn")
    given = dict.fromkeys(keywords(call))
    inspect.signature(varlen_attn).bind(*call.args, **given)
    q = torch.empty(10, 4, 8, dtype=torch.bfloat16, device=META, requires_grad=True)
    k = torch.empty(10, 2, 8, dtype=torch.bfloat16, device=META, requires_grad=True)
    v = torch.empty(10, 2, 6, dtype=torch.bfloat16, device=META, requires_grad=True)
    packing = PackingMetadata(torch.empty(3, dtype=torch.int32, device=META), 6, ())
    out = _flash_attention(q, k, v, packing, None, 3)
    assert out.shape == (10, 4, 6)
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


def test_torch_2_11_has_no_word_for_groups_of_heads(monkeypatch):
    def older(q, k, v, of_q, of_k, longest_q, longest_k, *, scale=None, window_size=(-1, -1)):
        return q

    monkeypatch.setattr(varlen, "varlen_attn", older)
    q, k = (torch.empty(5, heads, 8, dtype=torch.bfloat16, device=META) for heads in (4, 2))
    packing = PackingMetadata(torch.empty(2, dtype=torch.int32, device=META), 5, ())
    assert causal_attention(q, k, k, packing, None, None) is not None


@pytest.mark.parametrize("width", [4, 12, 264])
def test_heads_of_other_widths_than_the_flash_kernel_has_go_in_rectangles(width):
    lengths = torch.tensor([0, 3, 8])
    packing = PackingMetadata(lengths.int(), 5, ())  # as an accelerator has it
    q, k, v = torch.randn(3, 8, 2, width, dtype=torch.bfloat16)
    found = causal_attention(q, k, v, packing, None, None)
    wanted = causal_attention(q, k, v, PackingMetadata.of(lengths, torch.device("cpu")), None, None)
    assert torch.equal(found, wanted)


def test_blocks_of_a_ring_call_the_flash_kernels_as_torch_has_them():
    for name, least in (("_flash_attention_forward", 2), ("_flash_attention_backward", 3)):
        (call,) = calls("parallel/block_attention.py", name)
        schema = getattr(torch.ops.aten, name).default._schema
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        known = {argument.name for argument in schema.arguments}
        assert keywords(call) <= known and len(schema.returns) >= least
        starred = sum(isinstance(argument, ast.Starred) for argument in call.args)
        given = len(call.args) + starred  # each of these is a pair
        named = keywords(call) & {argument.name for argument in positional}
        assert given + len(named) == len(positional), (name, [a.name for a in positional])
    forward = torch.ops.aten._flash_attention_forward.default._schema
    assert [r.name for r in forward.returns[:2]] == ["output", "softmax_logsumexp"]


def test_blocks_of_a_ring_have_the_shapes_that_they_are_merged_in():
    rows = split_over_ring(torch.tensor([0, 7, 12]), 2)
    block = AttentionBlock.between(rows[0], rows[0], 0, META)
    tokens = int(block.query_lengths.sum())
    shapes = [(tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in shapes)
    out, lse = _flash_forward(q, k, v, block, 0.5)
    assert out.shape == q.shape and out.dtype == lse.dtype == torch.float32
    assert lse.shape == (tokens, 4)
    found = _flash_backward(out.bfloat16(), q, k, v, out.bfloat16(), lse, block, 0.5)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


def test_the_accelerator_interface_is_there():
    for name in ("device_count", "set_device_index", "synchronize", "empty_cache", "is_available"):
        assert callable(getattr(torch.accelerator, name))
    inspect.signature(torch.accelerator.synchronize).bind(torch.device("cpu"))
    inspect.signature(torch.accelerator.set_device_index).bind(0)
    assert {"record", "synchronize"} <= set(dir(torch.Event))


def test_what_is_asked_of_process_groups_is_there():
    from torch._C._distributed_c10d import Backend, ProcessGroup

    assert {"_get_backend", "_device_types", "group_name"} <= set(dir(ProcessGroup))
    assert "_get_sequence_number_for_group" in dir(Backend)
    assert {"pg_map", "group_count"} <= set(dir(dist.distributed_c10d._world))
    inspect.signature(dist.distributed_c10d._update_default_pg).bind(None)


@pytest.mark.more
def test_every_group_of_an_accelerator_takes_tensors_of_the_host_too():
    """Small figures travel as the host's tensors, everything else as the device's: each group has
    to have both, so none may be made with a back end of its own."""
    for kind, backend in COLLECTIVE_BACKENDS.items():
        if kind != "cpu":
            pairs = dict(part.split(":") for part in backend.split(","))
            assert pairs.keys() == {"cpu", kind}
    makers = {"init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in makers:
                is_first = ast.unparse(node.func).endswith("init_process_group")
                assert "backend" not in keywords(node), path
                backend = ast.unparse(node.args[0]) if is_first else ""
                assert not is_first or backend.startswith("COLLECTIVE_BACKENDS["), path


# vLLM


@needs_vllm
def test_the_engine_is_given_what_vllm_takes():
    known = parameters(method(vllm_class("entrypoints/llm.py", "LLM"), "__init__"))
    known |= fields(vllm_class("engine/arg_utils.py", "EngineArgs"))
    (call,) = calls("rollout/vllm_startup.py", "LLM")
    given = keywords(call)
    for node in ast.walk(tree_of(ROOT / "rollout/vllm_startup.py")):  # and by device
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            given |= {key.value for key in node.value.keys if key is not None}
    assert "enable_sleep_mode" in given
    assert given <= known, sorted(given - known)


@needs_vllm
def test_sampling_is_asked_for_as_vllm_has_it():
    known = fields(vllm_class("sampling_params.py", "SamplingParams"))
    for call in calls("rollout/vllm_engine.py", "SamplingParams"):
        assert keywords(call) <= known, sorted(keywords(call) - known)


@needs_vllm
def test_sleeping_and_waking_is_as_vllm_has_it():
    llm = vllm_class("entrypoints/llm.py", "LLM")
    for name in ("sleep", "wake_up", "reset_prefix_cache"):
        for call in calls("rollout/vllm_engine.py", name):
            if ast.unparse(call.func).startswith("self._llm."):
                assert keywords(call) <= parameters(method(llm, name)), name
    worker = vllm_class("v1/worker/gpu_worker.py", "Worker")
    assert "level" in parameters(method(worker, "sleep"))
    assert "tags" in parameters(method(worker, "wake_up"))
    tags = {
        tag.value
        for call in calls("rollout/vllm_engine.py", "wake_up")
        for word in call.keywords
        for tag in getattr(word.value, "elts", ())
    }
    text = ast.unparse(worker) + ast.unparse(llm) + _core()
    assert tags == {"weights", "kv_cache"} and all(f"'{tag}'" in text for tag in tags)


def _core():
    return ast.unparse(vllm_class("v1/engine/core.py", "EngineCore"))


@needs_vllm
def test_the_external_launcher_still_asks_where_to_meet():
    launcher = vllm_class("v1/executor/uniproc_executor.py", "ExecutorWithExternalLauncher")
    asked = method(launcher, "_distributed_args")
    assert parameters(asked) == {"self"}
    (answer,) = [node for node in ast.walk(asked) if isinstance(node, ast.Return)]
    assert len(answer.value.elts) == 3
    parent = vllm_class("v1/executor/uniproc_executor.py", "UniProcExecutor")
    assert "self._distributed_args()" in ast.unparse(parent)
    assert "driver_worker" in ast.unparse(parent)


@needs_vllm
def test_the_process_groups_of_vllm_are_variables_of_a_module():
    path = Path(importlib.util.find_spec("vllm").origin).parent / "distributed/parallel_state.py"
    named = {
        node.target.id: ast.unparse(node.annotation)
        for node in tree_of(path).body
        if isinstance(node, ast.AnnAssign)
    }
    groups = {name for name, kind in named.items() if "GroupCoordinator" in kind}
    assert {"_WORLD", "_TP", "_PP", "_DP", "_EP"} <= groups
    assert "_NODE_COUNT" in named


# Python


def test_names_of_shared_memory_are_made_from_what_is_set():
    source = inspect.getsource(shared_memory._make_filename)
    for name in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        assert hasattr(shared_memory, name) and name in source

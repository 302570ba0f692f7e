"""What only an accelerator reaches is called as the installed torch and Python have it: an upgrade
breaks a test here, not a job. For vLLM see test_vllm_calls.py."""

import ast
import inspect
from multiprocessing import shared_memory

import pytest
import torch
import torch.distributed as dist
from package_trees import PACKAGE, calls_of, keywords_of, nodes_of

from hybridrl.models.packed_attention import causal_attention
from hybridrl.models.packed_samples import PackingMetadata
from hybridrl.system.device_traits import COLLECTIVE_BACKENDS

META = torch.device("meta")


# torch


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_of_packed_samples_is_called_as_torch_has_it(window, sinks):
    q = torch.empty(10, 4, 8, dtype=torch.bfloat16, device=META, requires_grad=True)
    k = torch.empty(10, 2, 8, dtype=torch.bfloat16, device=META, requires_grad=True)
    v = torch.empty(10, 2, 6, dtype=torch.bfloat16, device=META, requires_grad=True)
    of_heads = torch.empty(4, device=META, requires_grad=True) if sinks else None
    packing = PackingMetadata.of(torch.tensor([0, 4, 10]), META)
    out = causal_attention(q, k, v, packing, None, window, of_heads)
    assert out.shape == (10, 4, 6)
    out.sum().backward()
    for x in (q, k, v, *([of_heads] if sinks else [])):
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("width", [4, 12, 264])
def test_heads_of_other_widths_than_the_flash_kernel_has_go_in_rectangles(width):
    packing = PackingMetadata.of(torch.tensor([0, 3, 8]), META)
    q, k, v = torch.empty(3, 8, 2, width, dtype=torch.bfloat16, device=META)
    assert "buckets" not in vars(packing)
    causal_attention(q, k, v, packing, None, None)
    assert "buckets" in vars(packing)


def test_flash_kernels_are_called_as_torch_has_them():
    for name, least in (("_flash_attention_forward", 2), ("_flash_attention_backward", 3)):
        (call,) = calls_of("models/flash_attention.py", name)
        schema = getattr(torch.ops.aten, name).default._schema
        known = {argument.name for argument in schema.arguments}
        assert keywords_of(call) <= known and len(schema.returns) >= least
    forward = torch.ops.aten._flash_attention_forward.default._schema
    assert [r.name for r in forward.returns[:2]] == ["output", "softmax_logsumexp"]


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
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in makers:
                is_first = ast.unparse(node.func).endswith("init_process_group")
                assert "backend" not in keywords_of(node), path
                backend = ast.unparse(node.args[0]) if is_first else ""
                assert not is_first or backend.startswith("COLLECTIVE_BACKENDS["), path


# Python


def test_names_of_shared_memory_are_made_from_what_is_set():
    source = inspect.getsource(shared_memory._make_filename)
    for name in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        assert hasattr(shared_memory, name) and name in source

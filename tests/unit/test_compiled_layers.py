"""`actor.compile`: the same gradients, and a word where it does not work."""

import logging
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from engine_cases import (
    CLIPPED,
    CPU,
    assert_same_gradient,
    expectations,
    make_batch,
    make_engine,
    make_model,
    update,
)
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next

from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.engine import compiled_layers
from hybridrl.engine.compiled_layers import compile_layers
from hybridrl.models import packed_attention
from hybridrl.models.language_model import build_language_model
from hybridrl.models.model_shape import compute_model_shape
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.parallel import fsdp


@pytest.fixture(autouse=True)
def attention():
    yield
    AttentionInterface.register(PACKED_ATTENTION, packed_attention.packed_attention)


@pytest.mark.long
def test_compiled_layers_that_are_sharded_and_repeated_learn_the_same(mesh, monkeypatch, caplog):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    settings = {"gradient_checkpointing": "full", "tokens_per_microbatch": 60}
    # Traced, but not given to the C++ compiler, which would take half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.utils.counters.clear()
    with caplog.at_level(logging.WARNING, "hybridrl"):
        engine = make_engine(mesh, compile="true", **settings)
        found, _ = update(engine, make_batch())
    assert not caplog.records
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"
    assert_same_gradient(found, expectations()(AGGREGATION_MODES[0], CLIPPED)[0])


def test_of_sizes_only_numbers_of_tokens_are_symbols(mesh, monkeypatch):
    """Widths are not, though parameters are sharded and each layer is of several graphs."""
    symbols = []

    def record(graph, _):
        inputs = graph.graph.find_nodes(op="placeholder")
        values = [node.meta.get("example_value") for node in inputs]
        tensors = [one for one in values if isinstance(one, torch.Tensor)]
        shape = [size for one in tensors for size in one.shape if not isinstance(size, int)]
        symbols.append({symbol for size in shape for symbol in size.node.expr.free_symbols})
        return graph

    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    torch._dynamo.reset()  # sizes that varied in another test would be symbols from the start
    engine = make_engine(mesh, compile="true", tokens_per_microbatch=32)
    update(engine, make_batch())
    assert symbols[-1] and all(len(found) <= 1 for found in symbols)


@pytest.mark.parametrize(("wanted", "compiles"), [("auto", False), ("false", False)])
def test_cpus_compile_only_if_told_to(wanted, compiles):
    policy = CausalPolicy(make_model())
    compile_layers(policy, wanted, CPU)
    layers = policy.inner.base_model.layers
    assert all(("forward" in vars(layer)) is compiles for layer in layers)


def test_accelerators_compile_by_themselves_what_is_not_small(monkeypatch):
    monkeypatch.setattr(compiled_layers, "is_compile_worthwhile", lambda kind: True)
    for limit, compiles in ((0, True), (1 << 20, False)):
        monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", limit)
        policy = CausalPolicy(make_model())
        compile_layers(policy, "auto", CPU)
        assert all(("forward" in vars(m)) is compiles for m in policy.inner.base_model.layers)


def test_a_layer_that_does_not_compile_runs_as_it_is(mesh, monkeypatch, caplog):
    def broken(function, **_):
        def run(*args, **kwargs):
            raise TorchDynamoException("no such luck")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING, "hybridrl"):
        engine = make_engine(mesh, compile="true", tokens_per_microbatch=60)
        found, _ = update(engine, make_batch())
    assert len(caplog.records) == len(engine.model.inner.base_model.layers), "once for each layer"
    assert "Qwen2DecoderLayer does not compile" in caplog.text and "no such luck" in caplog.text
    assert_same_gradient(found, expectations()(AGGREGATION_MODES[0], CLIPPED)[0])


def test_a_process_without_the_compiler_says_so(caplog):
    policy = CausalPolicy(make_model())
    switched_off = torch._dynamo.config.patch(disable=True)
    with switched_off, caplog.at_level(logging.WARNING, "hybridrl"):
        compile_layers(policy, "true", CPU)
    assert "actor.compile=true" in caplog.text and "switched torch's compiler off" in caplog.text


class CountedProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation.name() in ("aten::mm", "aten::addmm")
        return operation(*args, **(kwargs or {}))


def flash_forward(q, k, v, case):
    """In place of attention, what a GPU's keeps: no rectangles, and no keys for each head."""
    return q.clone(), torch.zeros(q.shape[1], len(q))


def measured(kept, layers):
    """Bytes of a token that compiled layers keep; the matrix products of their backward."""
    torch._dynamo.reset()
    config = AutoConfig.for_model(**SHAPE, num_hidden_layers=layers)
    model = build_language_model(config, attn_implementation=PACKED_ATTENTION)
    policy = CausalPolicy(model).train()
    assert compile_layers(policy, "true", CPU, kept) == "none"
    samples, saved = PackedSamples.of(make_batch(), CPU), {}
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    policy.hidden(samples).sum().backward()  # which compiles
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        states = policy.hidden(samples)
    with CountedProducts() as backward:
        states.sum().backward()
    return sum(saved.values()) / samples.input_ids.numel(), backward.products


SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 23,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def divided(monkeypatch):
    """Layers are divided into forward and backward as for a device, and not compiled further."""
    monkeypatch.setattr(packed_attention, "fits_flash", lambda query: True)
    monkeypatch.setattr(packed_attention, "flash_forward", flash_forward)
    monkeypatch.setattr(packed_attention, "flash_backward", lambda grad, q, k, v, *_: (q, k, v))
    monkeypatch.setattr(compiled_layers, "_BACKEND", "aot_eager_decomp_partition")
    plain = partial(torch.compile, backend=compiled_layers._BACKEND)
    monkeypatch.setattr(torch, "compile", plain)


@pytest.mark.more
def test_compiled_layers_keep_what_checkpointing_says(divided, monkeypatch):
    (none, once), (selective, same), (block, more) = (
        measured(kept, 1) for kept in ("none", "selective", "block")
    )
    assert block < selective < none
    assert same == once == 2 * 7, "of each product, one for its input and one for its weight"
    assert more == 2 * 7 + 2, "and those of the MLP before its last, whose results no part is given"


@pytest.mark.more
@pytest.mark.parametrize("kept", ["none", "selective", "block"])
def test_the_plan_knows_what_compiled_layers_keep(divided, kept):
    one, two = (measured(kept, layers)[0] for layers in (1, 2))
    config = AutoConfig.for_model(**SHAPE, num_hidden_layers=4)
    planned = compute_model_shape(config, "float32", checkpointing=kept).compiled.per_layer
    assert planned == pytest.approx(two - one, rel=0.1)


@pytest.mark.parametrize(
    ("kept", "around"),
    [("none", "none"), ("selective", "full"), ("block", "full"), ("full", "full")],
)
def test_a_linear_attention_between_compiled_parts_is_limited_from_around(kept, around):
    config = shrink_config(AutoConfig.for_model("qwen3_next"), layers=1)
    model = build_language_model(config, attn_implementation=PACKED_ATTENTION)
    assert compile_layers(CausalPolicy(model), "true", CPU, kept) == around
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        assert vars(modeling_qwen3_next)[name]._torchdynamo_disable
    assert not hasattr(modeling_qwen3_next.use_kernelized_func, "_torchdynamo_disable")


def test_what_the_package_kernels_makes_of_a_function_is_left_out_too(monkeypatch):
    """Of a rotary embedding, which all models have, it makes one as well."""

    def module_of(func):
        class Func(torch.nn.Module):
            __module__ = "kernels.layer.layer"

            def forward(self, *args, **kwargs):
                return func(*args, **kwargs)

        return Func()

    def doubled(query):
        return 2 * query

    modeling = ModuleType(__name__)
    scan = use_kernel_func_from_hub_with_fallback("selective_scan_fn", "no_such_package")(doubled)
    modeling.scan, modeling.rotary = module_of(scan), module_of(doubled)
    monkeypatch.setitem(sys.modules, modeling.__name__, modeling)
    assert compiled_layers._leave_out_kernels(modeling.__name__)
    assert modeling.scan._torchdynamo_disable and modeling.scan(query=3) == 6
    assert isinstance(modeling.rotary, torch.nn.Module)

"""Layers of a kind share their compiled graphs, and so do samples, whatever their lengths."""

import logging
from functools import partial

import pytest
import torch
from engine_cases import CPU
from test_admission import FAMILIES
from torch._dynamo.utils import counters
from transformers import AttentionInterface, AutoConfig

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.engine.compiled_layers import compile_layers
from hybridrl.models.activation_checkpointing import set_activation_checkpointing
from hybridrl.models.expert_routing import ExpertRouters
from hybridrl.models.language_model import build_language_model
from hybridrl.models.packed_attention import PACKED_ATTENTION, packed_attention
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.models.shrunk_config import shrink_config
from hybridrl.parallel import fsdp
from hybridrl.parallel.fsdp import apply_fsdp

LENGTHS = [(20, 33), (40,), (17, 150, 9), (140,), (21, 40), (15, 15, 15)]
OTHER_LENGTHS = [(270,), (230, 30), (31, 31)]
"""Tokens of the samples of micro-batches. A row alone, rows of one length, and rows that fill one
piece of a linear attention behind others have graphs of their own."""
CASES = [(family, kept, False) for family in FAMILIES for kept in ("none", "full")]
CASES += [(family, kept, True) for family, kept, _ in CASES if family in ("qwen3_moe", "mixtral")]
"""Family, what checkpointing keeps, and whether routers repeat choices."""
FEWEST = {"jamba": 6, "lfm2": 4, "qwen3_5_text": 4, "qwen3_next": 4}
"""Layers with which each kind of layer has stood behind each other kind, if 2 are too few."""


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Layers are sharded each, and traced, but not given to the C++ compiler, which would take
    minutes."""
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def batch_of(lengths, routing, replays):
    ids = [torch.arange(length) % 100 for length in lengths]
    columns = {"prompt_ids": [i[:3] for i in ids], "response_ids": [i[3:] for i in ids]}
    if replays:
        chosen = routing.layers * routing.chosen
        columns[ROUTED_EXPERTS] = [
            torch.zeros((len(i) - 1) * chosen, dtype=torch.uint8) for i in ids
        ]
    return Batch.from_columns(columns)


def graphs_of(mesh, family, layers, kept, replays, batches):
    """Graphs that are compiled to score and to learn from micro-batches."""
    rows, settings = FAMILIES[family]
    config = AutoConfig.for_model(family, **settings)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 1  # so that few layers have both kinds, too
    config = shrink_config(config, layers=layers)
    torch._dynamo.reset()
    counters.clear()
    model = build_language_model(config, attn_implementation=PACKED_ATTENTION)
    model.config.use_cache = False
    set_activation_checkpointing(model, kept)
    routing = ExpertRouters.of(model)
    assert routing or not replays
    policy = CausalPolicy(model, rows)
    compile_layers(policy, "true", CPU)
    apply_fsdp(policy, mesh.fsdp, torch.float32, offload=False)
    for lengths in batches:
        samples = PackedSamples.of(batch_of(lengths, routing, replays), CPU, rows)
        with torch.no_grad():
            policy.eval()(samples)
        if routing:
            routing.count(CPU)
            routing.keep_balance(torch.rand(routing.layers, routing.experts))
        policy.train()(samples)["log_probs"].sum().backward()
        if routing:
            routing.counted()
            routing.keep_balance(None)
    return counters["stats"]["unique_graphs"]


def tier_of(case):
    """The marks of a case, each of which takes half a minute."""
    is_first = case in (("qwen3_moe", "none", False), ("qwen3_moe", "full", True))
    return pytest.mark.more if is_first else pytest.mark.long


@pytest.mark.parametrize(
    ("family", "kept", "replays"), [pytest.param(*case, marks=tier_of(case)) for case in CASES]
)
def test_graphs_do_not_grow_with_layers(mesh, caplog, family, kept, replays):
    with caplog.at_level(logging.WARNING):
        fewest = FEWEST.get(family, 2)
        few = graphs_of(mesh, family, fewest, kept, replays, LENGTHS)
        more = graphs_of(mesh, family, fewest + 2, kept, replays, LENGTHS + OTHER_LENGTHS)
    assert 0 < few == more
    assert "recompile_limit" not in caplog.text

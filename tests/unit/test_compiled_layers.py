"""`actor.compile`: the same gradients, and a word where it does not work."""

import logging
from functools import partial

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
from transformers import AttentionInterface

from hybridrl.algorithms.policy_losses import AGGREGATION_MODES
from hybridrl.engine import compiled_layers
from hybridrl.engine.compiled_layers import compile_layers
from hybridrl.models.packed_attention import PACKED_ATTENTION, packed_attention
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel import fsdp


@pytest.fixture(autouse=True)
def attention():
    yield
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


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


def test_a_process_without_the_compiler_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    policy = CausalPolicy(make_model())
    with caplog.at_level(logging.WARNING, "hybridrl"):
        compile_layers(policy, "true", CPU)
    assert "actor.compile=true" in caplog.text and "switched torch's compiler off" in caplog.text

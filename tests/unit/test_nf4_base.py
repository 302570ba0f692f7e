"""Adapters around a base in NF4: its codes, its gradients, what it takes, and who sees it whole."""

from dataclasses import replace

import plain_torch
import pytest
import torch
from tiers import few_of
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from hybridrl.checks.settings.algorithm_checks import check_algorithm
from hybridrl.config.schema import CHECKPOINTING_MODES, LoraAdapterConfig
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.models.activation_checkpointing import (
    NO_CHECKPOINTING,
    set_activation_checkpointing,
)
from hybridrl.models.lora import add_adapters, check_lora_targets, merge_adapters
from hybridrl.models.model_shape import compute_model_shape, find_attention_length
from hybridrl.planner.memory.model_part import ModelPart
from hybridrl.quantization.nf4_base import NF4_LEVELS, NF4Linear, quantize_base

pytest.importorskip("peft", reason="adapters need peft: pip install peft")
CONFIG = Qwen2Config(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=200,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
NF4 = LoraAdapterConfig(rank=2, targets=["q_proj", "down_proj"], base_format="nf4")


def adapted(config=CONFIG, lora=NF4):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    add_adapters(model, lora)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1)
    return model


def test_levels_are_quantiles_of_the_normal_distribution():
    torch.testing.assert_close(
        torch.tensor(NF4_LEVELS).double(), plain_torch.normal_quantiles(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("shape", [(64, 128), (33, 7), (1, 1), (200, 48), (300, 300)])
def test_a_layer_has_the_nearest_of_the_levels(shape):
    torch.manual_seed(shape[0])
    linear = nn.Linear(*shape).requires_grad_(False)
    linear.weight[0] *= 0  # of which a block may be all
    layer = NF4Linear(linear)
    expected = plain_torch.in_nf4(linear.weight)
    torch.testing.assert_close(layer.dequantised().double(), expected, atol=1e-6, rtol=1e-5)
    bits = 8 * sum(b.nbytes for b in layer.buffers()) / linear.weight.numel()
    assert bits < 4.15 or linear.weight.numel() < 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_to_the_input_and_no_weight_is_kept(dtype):
    linear = nn.Linear(48, 200, dtype=dtype).requires_grad_(False)
    layer, kept = NF4Linear(linear), []
    x = torch.randn(5, 3, 48, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = layer(x)
    weight = layer.dequantised().to(dtype)
    assert not kept and torch.equal(found, nn.functional.linear(x, weight, linear.bias))
    other = torch.randn_like(found)
    assert torch.equal(torch.autograd.grad(found, x, other)[0], other @ weight)


@pytest.mark.parametrize("kept", CHECKPOINTING_MODES)
def test_checkpointed_layers_have_the_same_gradients(kept):
    found = []
    for mode in (NO_CHECKPOINTING, kept):
        model = adapted()
        quantize_base(model, None)
        model.config.use_cache = False
        set_activation_checkpointing(model.train(), mode)
        model(torch.arange(12)[None]).logits.square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_merged_weights_are_those_that_the_model_computes_with():
    """Layers with an adapter, and those without; in files no trace of the codes is left."""
    model = adapted()
    names = {name for name, _ in AutoModelForCausalLM.from_config(CONFIG).named_parameters()}
    quantize_base(model, None)
    assert sum(isinstance(m, NF4Linear) for m in model.modules()) == 3 * 7
    assert not any("codes" in name for name in model.state_dict())
    merged = dict(merge_adapters(model, model.named_parameters()))
    assert merged.keys() == names
    plain = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    plain.load_state_dict(merged, strict=False)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    assert find_attention_length(model) == find_attention_length(adapted())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layer", ["self_attn.q_proj.base_layer", "mlp.up_proj"])
def test_a_weight_that_is_not_finite_is_named(layer, value):
    model = adapted()
    model.get_submodule(f"model.layers.1.{layer}").weight.data[3, 5] = value
    name = f"model.layers.1.{layer.removesuffix('.base_layer')}.weight"
    with pytest.raises(ConfigError, match=rf"`{name}` has values that are not.*model\.path"):
        quantize_base(model, None)


@pytest.mark.parametrize("tied", few_of([False, True], [True]))
def test_the_plan_has_the_bytes_of_the_base(tied):
    config = Qwen2Config(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    model = adapted(config)
    quantize_base(model, None)
    shape = compute_model_shape(config, "float32", lora=NF4)
    part = ModelPart(shape, 3, (True, True), 1, 1, True, "cpu", False, False)
    codes = sum(b.nbytes for m in model.modules() if isinstance(m, NF4Linear) for b in m.buffers())
    assert part.resident()["base"] == pytest.approx(codes, rel=0.02)
    assert part.resident()["parameters"] == 4 * sum(p.numel() for p in model.parameters())
    assert part.parameters.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = compute_model_shape(config, "float32", lora=replace(NF4, base_format="full"))
    assert (shape.parameters, shape.active) == (whole.parameters, whole.active)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["actor.lora.base_format=nf4"], "Set actor.lora.rank"),
        (
            [
                *("actor.lora.rank=4", "actor.lora.base_format=nf4", "rollout=vllm"),
                *("model.path=x", "rollout.adapters=separate"),
            ],
            "rollout.adapters=merged",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        check_algorithm(load_config(given))


def test_a_model_without_linear_layers_is_refused():
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=40)
    lora = replace(NF4, targets=["c_attn"])
    with pytest.raises(ConfigError, match="base_format=nf4 is for models with linear layers"):
        check_lora_targets(config, lora)

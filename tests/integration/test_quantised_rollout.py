"""A generator in 8 bits, through the built-in trainer: its weights are the trainer's, rounded,
after every update, and its samples are weighed."""

import json

import pytest
import torch
from settings import SHORT
from torch import nn

from hybridrl.quantization.rounded_matrix import quantize_rows

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.vllm]
PLACES = [
    pytest.param([], id="on the trainer's devices"),
    pytest.param(["placement=separation"], id="on its own", marks=pytest.mark.long),
]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_layer_multiplies_with_the_newest_weights_rounded(kind, monkeypatch):
    """fp8, too, for which vLLM has a slow kernel on CPUs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter

    from hybridrl.rollout.vllm_quantization import QuantizedLinearMethod

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    outputs, inputs = 48, 80
    generator = torch.Generator().manual_seed(0)
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.randn(outputs, generator=generator), requires_grad=False)
    with set_current_vllm_config(VllmConfig()):
        method = QuantizedLinearMethod(kind)
        sizes = (inputs, [outputs], inputs, outputs, torch.float32)
        method.create_weights(layer, *sizes, weight_loader=lambda *_: None)
        assert layer.weight.is_meta
        states = torch.randn(5, inputs, generator=generator)
        for _ in range(2):
            weight = torch.randn(outputs, inputs, generator=generator)
            layer.weight = nn.Parameter(weight, requires_grad=False)
            for _ in range(2):  # vLLM asks again
                method.process_weights_after_loading(layer)
            assert not layer.weight.numel()
            kept, wanted = method.rows(outputs, inputs), quantize_rows(weight, kind)
            assert torch.equal(kept.scales, wanted.scales)
            assert torch.equal(kept.values.float(), wanted.values.float())
            exact = nn.functional.linear(states, weight, layer.bias)
            off = method.apply(layer, states, layer.bias) - exact
            assert off.norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_8_bits_follow_the_trainers(run, place):
    folder = run(
        *(*SHORT, "num_devices=2", "rollout.quantization=int8", "rollout.verify_weights=true"),
        *place,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "mismatch/k3" in line]
    assert len(steps) == 2
    for step in steps:
        assert 1e-7 < step["mismatch/k3"] < 0.1  # that in float32 is about 1e-14
        assert step["policy/correction_weight"] != 1

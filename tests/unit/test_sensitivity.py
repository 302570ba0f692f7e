"""What indicators say of bits, against what is measured."""

import json

import pytest
import torch
from scipy.stats import spearmanr
from tiers import few_of
from torch import nn
from transformers import AutoModelForCausalLM

from hybridrl.errors import ConfigError, DataError
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.quantization.low_bit_linear import (
    apply_layer_bits,
    find_decoder_layers,
    find_linear_layers,
)
from hybridrl.quantization.output_kl import (
    activation_rounding_kl,
    measure_sensitivity,
    token_kl,
    token_kl_divergence,
    weight_rounding_kl,
)

LAYERS = 5


def uneven_model(attention="sdpa"):
    """Layers with weights of different sizes, some with outliers."""
    torch.manual_seed(0)
    config = make_tiny_config(hidden_size=64, layers=LAYERS, heads=2, context=64)
    config.vocab_size = 60
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for number, layer in enumerate(find_decoder_layers(model)):
            for linear in find_linear_layers(layer).values():
                heavy = (0.3 * (number % 3) * torch.randn_like(linear.weight)).exp()
                linear.weight.mul_(heavy * (1 + number % 4))
    return model.eval()


def samples():
    torch.manual_seed(1)
    return [torch.randint(0, 60, (length,)) for length in (30, 0, 17, 1, 50)]


@pytest.mark.parametrize("attention", few_of(["sdpa", PACKED_ATTENTION], [PACKED_ATTENTION]))
def test_indicators_are_what_bits_add_to_the_kl(attention):
    model, tokens = uneven_model(attention), samples()
    found = measure_sensitivity(model, tokens, (8, 4, 16, 32))
    assert all(by[32] == 0 < by[16] < by[8] < by[4] for by in found.values())
    measured = {
        n: {bits: token_kl(model, tokens, {n: bits}) for bits in (8, 4)} for n in range(LAYERS)
    }
    for bits in (8, 4):
        said, seen = zip(*[(found[n][bits], measured[n][bits]) for n in found], strict=True)
        assert spearmanr(said, seen).statistic >= 0.7
        for one, other in zip(said, seen, strict=True):  # below 1e-6 float32 itself is as rough
            assert other < 1e-6 or 0.4 < one / other < 2.5
    halves = dict.fromkeys(range(LAYERS), 16)
    assert 0.2 < sums(found, halves) / token_kl(model, tokens, halves, whole=32) < 5
    everywhere = dict.fromkeys(range(LAYERS), 4)
    assert 0.5 < sums(found, everywhere) / token_kl(model, tokens, everywhere) < 2
    assert json.loads(json.dumps(found)) == {
        str(n): {str(b): v for b, v in by.items()} for n, by in found.items()
    }


def sums(found, bits):
    """What the indicators say of a choice as a whole."""
    return sum(found[layer].get(number, 0.0) for layer, number in bits.items())


def test_a_model_is_afterwards_as_it_was():
    model, tokens = uneven_model(), samples()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        first = measure_sensitivity(model, tokens)
    token_kl(model, tokens, {0: 4})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None or not name.startswith("model.layers")
        assert parameter.requires_grad == (parameter is model.lm_head.weight)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert measure_sensitivity(model, tokens) == first
    assert token_kl(model, tokens, {}) == 0


def test_rounding_noise_is_that_of_a_grid():
    """By hand: one row of two groups, and one token."""
    weight = torch.tensor([[7.0, 1, 3.5, 0]])
    gradient = torch.tensor([[1.0, 2, 4, 0]])
    assert weight_rounding_kl(weight, gradient, 7, group=2) == pytest.approx(
        (1 * 5 + 0.25 * 16) / 24
    )
    assert weight_rounding_kl(weight, gradient, 7, group=3) == pytest.approx(21 / 24)
    assert weight_rounding_kl(weight, gradient, 7) == pytest.approx(21 / 24)
    x = torch.tensor([[127.0, 3], [0, 254]])
    assert activation_rounding_kl(x, torch.tensor([[1.0, 1], [0, 2]]), 127) == pytest.approx(
        18 / 24
    )
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    assert token_kl_divergence(p, q).item() == pytest.approx(0.5 * torch.tensor(4 / 3).log().item())


def test_what_cannot_be_measured_is_said():
    model = uneven_model()
    for wrong in ([], [torch.zeros(0, dtype=torch.int64)]):
        with pytest.raises(DataError, match="no token"):
            measure_sensitivity(model, wrong)
        with pytest.raises(DataError, match="no token"):
            token_kl(model, wrong, {0: 8})
    with pytest.raises(ConfigError, match="3 bits"):
        measure_sensitivity(model, samples(), (3,))
    with pytest.raises(ConfigError, match="no list of decoder layers"):
        measure_sensitivity(nn.Linear(2, 2), samples())
    apply_layer_bits(model, {0: 8})
    found = measure_sensitivity(model, samples())
    assert found[0] == {8: 0, 4: 0} and found[1][8] > 0

"""Linear layers in 8 and 4 bits."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hybridrl.errors import ConfigError
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.quantization import int8_products
from hybridrl.quantization.low_bit_linear import (
    KINDS,
    Int4Linear,
    Int8Linear,
    LowBitLinear,
    apply_layer_bits,
    find_decoder_layers,
    temporary_layer_bits,
)


def made(inputs, outputs, bias=True, dtype=torch.float32):
    torch.manual_seed(inputs * 1000 + outputs)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def tiny_model(layers=3):
    torch.manual_seed(0)
    config = make_tiny_config(hidden_size=64, layers=layers, heads=2, context=64)
    config.vocab_size = 30
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize("packs", [True, False], ids=["oneDNN", "int_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (33, 7), (1, 1), (200, 48)])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_layer_computes_with_its_rounded_weights(bits, shape, dtype, packs, monkeypatch):
    if not packs:
        monkeypatch.setattr(int8_products, "has_onednn_int8", lambda kind: False)
    linear = made(*shape, dtype=dtype)
    low = KINDS[bits](linear)
    whole = low.dequantised()
    scale = linear.weight.float().abs().amax(1, keepdim=True) / {16: 127, 8: 127, 4: 7}[bits]
    assert whole.shape == linear.weight.shape
    assert ((whole - linear.weight.float()).abs() <= 0.51 * scale).all()
    for leading in [(5,), (2, 3), (0,), (1, 40)]:
        x = torch.randn(*leading, shape[0], dtype=dtype)
        found, wanted = low(x), x.float() @ whole.T + linear.bias.float()
        assert found.dtype is dtype and found.shape == (*leading, shape[1])
        error = (found.float() - wanted).norm() / max(wanted.norm(), 1e-9)
        assert error < 0.02


def test_a_token_that_is_far_larger_does_not_spoil_others():
    low = Int8Linear(made(64, 32))
    x = torch.randn(4, 64)
    alone = low(x[1:])
    x[0] *= 1e6
    assert torch.equal(low(x)[1:], alone)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_are_not_finite_are_seen(bits):
    low = KINDS[bits](made(64, 32))
    x = torch.randn(3, 64)
    x[1, 5] = torch.nan
    found = low(x)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
    assert not low(torch.zeros(1, 64) / 0).isfinite().any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_of_zeros_gives_its_bias(bits):
    linear = made(64, 32)
    linear.weight.zero_()
    assert torch.equal(KINDS[bits](linear)(torch.randn(2, 64)), linear.bias.expand(2, -1))


@pytest.mark.parametrize("kind", [Int4Linear, Int8Linear])
def test_weights_that_come_later_take_the_place_of_the_first(kind):
    low, other = kind(made(64, 32)), made(64, 32)
    other.weight.mul_(-2)
    low.set_weight(other.weight)
    x = torch.randn(3, 64)
    assert torch.equal(low(x), kind(other)(x))
    with pytest.raises(ValueError, match="came for a layer of"):
        low.set_weight(torch.zeros(32, 63))


def test_bits_are_chosen_by_layer_and_taken_back():
    model, ids = tiny_model(), torch.arange(20)[None]
    before = model(ids).logits
    with temporary_layer_bits(model, {0: 8, 2: 4, 1: 16}):
        kinds = [
            {type(m) for m in layer.modules() if isinstance(m, nn.Linear | LowBitLinear)}
            for layer in find_decoder_layers(model)
        ]
        assert kinds == [{Int8Linear}, {nn.Linear}, {Int4Linear}]
        assert not torch.equal(model(ids).logits, before)
        assert isinstance(model.lm_head, nn.Linear)
    assert torch.equal(model(ids).logits, before)
    apply_layer_bits(model, {})
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize(
    ("bits", "said"), [({3: 8}, "has layers 0 to 2"), ({-1: 8}, "layers 0"), ({0: 5}, "5 bits")]
)
def test_bits_that_no_layer_can_have_are_refused(bits, said):
    model, ids = tiny_model(), torch.arange(20)[None]
    before = model(ids).logits
    with pytest.raises(ConfigError, match=said):
        apply_layer_bits(model, bits)
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(ConfigError, match="no list of decoder layers"):
        apply_layer_bits(nn.Linear(2, 2), {0: 8})

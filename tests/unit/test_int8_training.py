"""Linear layers whose forward and backward multiply in 8 bits."""

import pytest
import torch
from test_low_bit_linear import tiny_model
from torch import nn

from hybridrl.quantization import int8_products
from hybridrl.quantization.rounded_matrix import (
    quantize_columns_int8,
    quantize_rows_int8,
    seed_rounding,
)
from hybridrl.systems.low_bits.low_bit_training import Int8LinearFunction, enable_low_bit_training


@pytest.mark.parametrize("shape", [(50, 64, 128), (3, 33, 7), (1, 1, 1), (0, 8, 8), (400, 96, 700)])
@pytest.mark.parametrize("padded", [False, True], ids=["any size", "as GPUs want"])
def test_products_and_gradients_are_nearly_those_of_floats(shape, padded, monkeypatch):
    if padded:
        monkeypatch.setattr(int8_products, "has_any_size_int_mm", lambda kind: False)
        monkeypatch.setattr(int8_products, "has_onednn_int8", lambda kind: False)
        monkeypatch.setattr(torch, "_int_mm", as_cublas)
    torch.manual_seed(0)
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, requires_grad=True)
    weight = torch.randn(outputs, inputs, requires_grad=True)
    gradient = torch.randn(tokens, outputs) * torch.rand(tokens, 1).exp()
    found = Int8LinearFunction.apply(x, weight)
    found.backward(gradient)
    wanted = (x @ weight.T, gradient @ weight, gradient.T @ x)
    for one, other in zip((found, x.grad, weight.grad), wanted, strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        assert (one - other).norm() <= 0.03 * other.norm()


def as_cublas(left, right, multiply=torch._int_mm):
    """Takes what an H100 took: of two matrices that lie row by row it multiplies only some."""
    assert left.is_contiguous() and right.t().is_contiguous()
    assert len(left) > 16 and left.shape[1] % 8 == right.shape[1] % 8 == 0
    return multiply(left, right)


def test_stochastic_rounding_is_right_in_the_mean():
    torch.manual_seed(0)
    x = torch.randn(5, 40)
    turns = [quantize_rows_int8(x, stochastic=True) for _ in range(2000)]
    mean = torch.stack([rows.values.float() * rows.scales for rows in turns]).mean(0)
    assert ((mean - x).abs() <= 0.06 * turns[0].scales).all()  # nearest may be off by half
    assert len({tuple(rows.values.flatten().tolist()) for rows in turns}) > 1000


def test_columns_have_scales_of_their_own():
    x = torch.randn(700, 500) * torch.rand(500)
    weights = torch.rand(700, 1)
    rounded = quantize_columns_int8(x, weights)
    off = (rounded.values * rounded.scales - x * weights).abs()
    assert (off <= 0.501 * rounded.scales).all() and rounded.scales.shape == (1, 500)


@pytest.mark.more
@pytest.mark.parametrize("bits", [8, 16])
def test_a_model_learns_with_some_layers_in_fewer_bits(bits):
    """The same from step to step but for rounding; parameters stay what they were."""
    losses = {}
    for chosen in ({}, {0: bits, 2: bits}):
        model = tiny_model().requires_grad_(True).train()
        names = [name for name, _ in model.named_parameters()]
        enable_low_bit_training(model, chosen)
        assert [name for name, _ in model.named_parameters()] == names
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = torch.arange(24).reshape(2, 12)
        torch.manual_seed(0)
        seen = []
        for _ in range(30):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses[bool(chosen)] = seen
    assert losses[False][0] != losses[True][0]
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.01)
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.2)


def test_what_is_not_finite_is_seen_in_gradients():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    gradient = torch.zeros(4, 5)
    gradient[1, 2] = torch.inf
    Int8LinearFunction.apply(x, weight).backward(gradient)
    assert not x.grad[1].isfinite().any() and not weight.grad.isfinite().all()
    assert isinstance(nn.Linear(1, 1), nn.Linear)


def test_stochastic_rounding_draws_from_its_seed_alone():
    """Not from the process's generator, which no checkpoint keeps."""
    x, cpu, found = torch.randn(9, 40), torch.device("cpu"), []
    for seed, further in ((3, 0), (3, 1), (4, 1)):
        torch.manual_seed(further)
        seed_rounding(cpu, seed)
        found.append([quantize_rows_int8(x, stochastic=True).values for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[1][0], found[2][0])

"""Matrices rounded to 8 bits, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.quantization import rounded_matrix as rounded_rows
from hybridrl.quantization.rounded_matrix import (
    FP8,
    INT8,
    LARGEST,
    TYPES,
    dequantize_rows,
    quantize_rows,
)

STEPS = {INT8: 0.5 / 127, FP8: 2**-4}
"""Largest error: of int8 as a share of the row's largest value, of fp8 (three bits after the first)
of the value itself."""


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    kind=st.sampled_from([INT8, FP8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_a_value_is_off_by_half_a_step_of_its_row(rows, columns, kind, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * scale).to(dtype)
    found = quantize_rows(weight, kind)
    assert found.values.dtype == TYPES[kind] and found.scales.shape == (rows, 1)
    largest = weight.float().abs().amax(1, keepdim=True)
    off = (dequantize_rows(found) - weight.float()).abs()
    relative = largest if kind == INT8 else weight.float().abs()
    least = largest * 2**-9 / LARGEST[kind]  # of fp8 near 0, where steps do not shrink any more
    assert (off <= relative * STEPS[kind] * 1.001 + (least if kind == FP8 else 0)).all()
    again = quantize_rows(dequantize_rows(found), kind)  # what is rounded already stays as it is
    assert torch.equal(again.values.float(), found.values.float())


@pytest.mark.parametrize("kind", [INT8, FP8])
def test_rows_without_a_largest_value_are_settled(kind):
    weight = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [2.0, -2.0], [1e-44, 0]])
    found = dequantize_rows(quantize_rows(weight, kind))
    assert not found[0].any()
    assert not found[1].isfinite().any() and not found[2].isfinite().any()
    assert torch.equal(found[3], weight[3])
    assert found[4].isfinite().all()


def test_a_large_matrix_is_rounded_part_by_part(monkeypatch):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    whole = quantize_rows(weight, INT8)
    monkeypatch.setattr(rounded_rows, "AT_A_TIME", 11)
    for one, other in zip(quantize_rows(weight, INT8), whole, strict=True):
        assert torch.equal(one, other)

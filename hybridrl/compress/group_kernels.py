"""The codecs of groups as Triton kernels: one pass over the values, and the bits of
`grouped_integers`.

They say in so many words what rounds how: quotients are IEEE's (`div_rn`), sums are in the
reference's order, nothing is fused, and bfloat16 is made of its bits, for not every GPU converts to
it, and Triton's interpreter rounds it its own way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hybridrl.compress.hadamard import HADAMARD_WIDTH, TAIL_FACTOR

_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
_HADAMARD_WIDTH = tl.constexpr(HADAMARD_WIDTH)
_TAIL_FACTOR = tl.constexpr(TAIL_FACTOR)
_ROUNDING_OFFSET = tl.constexpr(1.5 * 2**23)
"""Added to a smaller number and taken away again it leaves the nearest integer."""
_VALUES_PER_PROGRAM = 2048


def encode_groups(
    flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, largest: float, **kind: int
) -> None:
    """Fill `scales` and `codes`.

    Args:
        largest: The largest code.
        kind: GROUP, BITS and MIX of the codec, as the kernels have them.
    """
    rows, programs = _programs(len(scales), kind["GROUP"])
    constants = {"LARGEST": largest, "ROWS": rows, **kind}
    _encode[(programs,)](flat, scales, codes, len(flat), **constants, enable_fp_fusion=False)


def decode_groups(
    flat: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, **kind: int
) -> None:
    """Fill `flat`; see `encode_groups`."""
    rows, programs = _programs(len(scales), kind["GROUP"])
    rounds = flat.dtype is torch.bfloat16
    out = flat.view(torch.int16) if rounds else flat
    constants = {"BFLOAT16": rounds, "ROWS": rows, **kind}
    _decode[(programs,)](out, scales, codes, len(flat), **constants, enable_fp_fusion=False)


def _programs(groups: int, group: int) -> tuple[int, int]:
    """Return the groups per program and the number of programs."""
    rows = max(1, _VALUES_PER_PROGRAM // group)
    return rows, triton.cdiv(groups, rows)


@triton.jit
def _encode(
    values,
    scales,
    codes,
    numel,
    LARGEST: tl.constexpr,  # noqa: N803 (Triton's way to write constants)
    GROUP: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    MIX: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    if MIX:
        mixed = _times_h(value * (1.0 / _HADAMARD_WIDTH), ROWS, GROUP)
        value = tl.where(
            at < numel // _HADAMARD_WIDTH * _HADAMARD_WIDTH, mixed, value * _TAIL_FACTOR
        )
    magnitude = tl.abs(value)
    finite = magnitude < float("inf")
    lost = tl.max(tl.where(finite, 0, 1), 1) > 0
    most = tl.max(tl.where(finite, magnitude, 0.0), 1)
    scale = tl.div_rn(most, tl.full([ROWS], LARGEST, tl.float32))
    scale = tl.where(scale < _SMALLEST_SCALE, 0.0, scale)
    divisor = tl.where(scale == 0.0, float("inf"), scale)
    unit = tl.div_rn(value, tl.broadcast_to(divisor[:, None], (ROWS, GROUP)))
    unit = tl.where(lost[:, None], 0.0, unit)
    scale = tl.where(lost, float("nan"), scale)
    tl.store(scales + row, scale, mask=row * GROUP < numel)
    code = ((unit + _ROUNDING_OFFSET) - _ROUNDING_OFFSET).to(tl.int32)
    if BITS == 8:
        tl.store(codes + at, code.to(tl.uint8), mask=at < numel)
    else:
        first, second = tl.split(tl.reshape(code & 0xF, (ROWS, GROUP // 2, 2)))
        pair = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        tl.store(codes + pair, (first | (second << 4)).to(tl.uint8), mask=pair * 2 < numel)


@triton.jit
def _decode(
    values,
    scales,
    codes,
    numel,
    BFLOAT16: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    MIX: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if BITS == 8:
        code = tl.load(codes + at, mask=at < numel, other=0).to(tl.int32)
    else:
        pair = row[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        byte = tl.load(codes + pair, mask=pair * 2 < numel, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 0xF, byte >> 4), (ROWS, GROUP))
    half: tl.constexpr = 1 << (BITS - 1)
    unit = ((code ^ half) - half).to(tl.float32)
    if MIX:
        unmixed = _times_h(unit, ROWS, GROUP)
        unit = tl.where(
            at < numel // _HADAMARD_WIDTH * _HADAMARD_WIDTH, unmixed, unit * (1.0 / _TAIL_FACTOR)
        )
    scale = tl.load(scales + row, mask=row * GROUP < numel, other=0.0)
    value = unit * scale[:, None]
    if BFLOAT16:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A GPU's NaN is 0x7FFFFFFF, which rounds to minus zero.
        value = tl.where(value != value, 0x7FC0, bits).to(tl.int16)
    tl.store(values + at, value.to(values.dtype.element_ty), mask=at < numel)


@triton.jit
def _times_h(value, ROWS: tl.constexpr, GROUP: tl.constexpr):  # noqa: N803
    """Apply the Hadamard transform (see `hadamard._multiply_hadamard`): each value is added to the
    one at a distance, or subtracted from it."""
    wide: tl.constexpr = ROWS * GROUP // _HADAMARD_WIDTH
    value = tl.reshape(value, (wide, _HADAMARD_WIDTH))
    lane = tl.broadcast_to(tl.arange(0, _HADAMARD_WIDTH)[None, :], (wide, _HADAMARD_WIDTH))
    for stage in tl.static_range(5):
        other = tl.gather(value, lane ^ (1 << stage), 1)
        value = tl.where(((lane >> stage) & 1) == 1, other - value, value + other)
    return tl.reshape(value, (ROWS, GROUP))

"""Codecs of flat tensors: sizes, bytes, bounds of what they lose, and what they refuse."""

import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.compress.grouped_integers import GroupedIntegerCodec, pack_int4, unpack_int4
from hybridrl.compress.hadamard import apply_hadamard, invert_hadamard
from hybridrl.errors import CodecError, ConfigError
from hybridrl.system import device_traits as device

CODECS = [
    GroupedIntegerCodec(8, 2048),
    GroupedIntegerCodec(8, 64, hadamard=True),
    GroupedIntegerCodec(4, 128),
    GroupedIntegerCodec(4, 32, hadamard=True),
]
IDS = list(map(str, CODECS))
SIZES = [0, 1, 31, 32, 33, 127, 128, 2047, 2049, 5001]
TINY = torch.finfo(torch.float32).tiny
# A float32 operation, twice: the scale, and the product with it.
ROUNDED = 1 + 3 * 2**-24

numbers = st.floats(-(2.0**122), 2.0**122, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
tensors = st.lists(numbers, max_size=200).map(torch.tensor)
grouped = st.builds(
    GroupedIntegerCodec, bits=st.sampled_from([4, 8]), group=st.sampled_from([32, 128])
)


def heavy_tailed(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal, spread = torch.randn(2, numel, generator=generator)
    return normal * torch.exp(3 * spread)


def there_and_back(codec, values, dtype=torch.float32):
    return codec.decode(codec.encode(values), values.numel(), dtype)


def of_each(values, group, function):
    """`function` of each group, in the place of each of its values."""
    parts = values.split(group) if len(values) else ()
    return torch.cat([function(part).expand(len(part)) for part in parts] or [values])


def scales_of(values, codec):
    scales = of_each(values.abs() / codec.largest, codec.group, torch.max)
    return torch.where(scales < TINY, 0, scales)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_bytes_are_as_many_as_size_says(codec):
    for numel in SIZES:
        values = heavy_tailed(numel)
        encoded = codec.encode(values)
        assert encoded.dtype is torch.uint8 and encoded.shape == (codec.size(numel),)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            decoded = codec.decode(encoded, numel, dtype)
            assert decoded.dtype is dtype and decoded.shape == (numel,)
            # Computed in float32 and rounded once.
            assert decoded.equal(codec.decode(encoded, numel, torch.float32).to(dtype))


def test_sizes_to_the_bit():
    assert GroupedIntegerCodec(4, 2048).size(2048) == 1024 + 4
    assert GroupedIntegerCodec(4, 2048).size(2049) == 1025 + 8
    assert GroupedIntegerCodec(8, 128).size(129) == 129 + 8


@given(tensors, grouped)
def test_integers_lose_at_most_half_a_scale(values, codec):
    scales = scales_of(values, codec)
    error = (there_and_back(codec, values).double() - values.double()).abs()
    assert (
        error
        <= torch.where(scales > 0, scales.double() * 0.5 * ROUNDED, 128 * TINY)
        + values.abs().double() * 2**-22
    ).all()


@given(tensors, st.sampled_from([4, 8]))
def test_mixed_integers_lose_at_most_sixteen_scales_of_32_values(values, bits):
    codec = GroupedIntegerCodec(bits, 64, hadamard=True)
    whole = len(values) // 32 * 32
    scales = scales_of(apply_hadamard(values), codec).double()[:whole]
    error = (there_and_back(codec, values).double() - values.double())[:whole]
    largest = values[:whole].abs().double()
    for lost, scale, most in zip(*(t.split(32) for t in (error, scales, largest)), strict=True):
        if len(lost):
            assert lost.norm() <= 16 * scale[0] + most.max() * 2**-18 + 1e-34


@given(tensors)
def test_mixing_is_undone(values):
    most = of_each(values.abs(), 32, torch.max)
    assert ((invert_hadamard(apply_hadamard(values)) - values).abs() <= most * 2**-16 + 1e-36).all()


def test_mixing_is_sylvesters_hadamard_matrix():
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    integers = torch.randint(-127, 128, (4 * 32 + 5,)).float()
    whole, rest = (integers[:128].view(4, 32) @ matrix).view(-1), integers[128:]
    assert invert_hadamard(integers).equal(torch.cat((whole, rest * 8)))
    assert apply_hadamard(integers).equal(torch.cat((whole / 32, rest / 8)))


@pytest.mark.parametrize("numel", [127, 128, 129])
def test_what_is_left_over_of_mixing_spoils_no_scale(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    plain, mixed = (
        (there_and_back(GroupedIntegerCodec(4, 128, hadamard), values) - values).norm()
        for hadamard in (False, True)
    )
    assert mixed < 1.3 * plain


def test_mixing_helps_where_an_outlier_is():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    values[::256] *= 20
    plain, mixed = (
        (there_and_back(GroupedIntegerCodec(4, 128, hadamard), values) - values).norm()
        for hadamard in (False, True)
    )
    assert mixed < plain / 2


def test_bytes_of_four_bit_integers():
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, 2.5, 3.5, -1.0])  # halves go to even numbers
    encoded = GroupedIntegerCodec(4, 32).encode(values)
    assert bytes(encoded.tolist()) == struct.pack("=f", 1.0) + bytes([0x97, 0x01, 0x42, 0x0F])
    assert GroupedIntegerCodec(4, 32).decode(encoded, 7, torch.float32).tolist() == [
        *(7, -7, 1, 0, 2, 4, -1)
    ]


def test_bytes_of_eight_bit_integers():
    encoded = GroupedIntegerCodec(8, 32).encode(torch.tensor([254.0, -254.0, 1.0, 3.0, -3.1]))
    assert bytes(encoded.tolist()) == struct.pack("=f", 2.0) + bytes([127, 129, 0, 2, 254])


def test_every_pair_of_halves_comes_back():
    halves = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.cartesian_prod(halves, halves).view(-1)
    packed = pack_int4(pairs)
    assert len(packed.unique()) == 256 and unpack_int4(packed).equal(pairs)
    assert packed[1].item() == 0x98  # -8, -7: the first in the lower half


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_how_much_is_encoded_at_a_time_changes_no_bit(codec, monkeypatch):
    values = heavy_tailed(5001)
    encoded, decoded = codec.encode(values), there_and_back(codec, values)
    monkeypatch.setitem(device.VALUES_PER_CHUNK, "cpu", 1)
    assert codec.encode(values).equal(encoded)
    assert there_and_back(codec, values).equal(decoded)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_bytes_may_lie_anywhere_in_a_buffer(codec):
    values = heavy_tailed(333)
    size = codec.size(333)
    buffer = torch.full((size + 6,), 7, dtype=torch.uint8)
    codec.encode(values, buffer[1 : 1 + size])
    assert buffer[0] == 7 and (buffer[1 + size :] == 7).all()
    decoded = codec.decode(buffer[1 : 1 + size], 333, torch.float32)
    assert decoded.equal(there_and_back(codec, values))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_values_stay_as_they_are(codec):
    values = heavy_tailed(200).view(10, 20).requires_grad_()
    before = values.detach().clone()
    assert not codec.encode(values).requires_grad
    assert values.equal(before)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("what", [float("nan"), float("inf"), float("-inf")])
def test_a_group_that_is_not_finite_is_nan_and_no_other(codec, what):
    values = heavy_tailed(3 * codec.group)
    wanted = there_and_back(codec, values)
    values[codec.group + 3] = what
    decoded = there_and_back(codec, values)
    spoilt = torch.zeros(len(values), dtype=torch.bool)
    spoilt[codec.group : 2 * codec.group] = True
    assert decoded[spoilt].isnan().all() and decoded[~spoilt].equal(wanted[~spoilt])


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_zeros_and_what_is_almost_none_are_zeros(codec):
    assert there_and_back(codec, torch.zeros(300)).equal(torch.zeros(300))
    assert (there_and_back(codec, torch.full((300,), 1e-42)).abs() <= 1e-42).all()


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_codecs_travel(codec):
    assert pickle.loads(pickle.dumps(codec)) == codec


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: GroupedIntegerCodec(5, 128), "integers of 5 bits"),
        (lambda: GroupedIntegerCodec(4, 100), "`group` must be a power of two"),
        (lambda: GroupedIntegerCodec(4, 0), "0 values cannot share a scale"),
        (lambda: GroupedIntegerCodec(4, 16384), "from 32 to 8192"),
    ],
)
def test_codecs_that_cannot_be(made, said):
    with pytest.raises(ConfigError, match=said):
        made()


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_what_does_not_fit_is_a_sentence(codec):
    values = torch.ones(64)
    with pytest.raises(CodecError, match=r"values of torch\.int64"):
        codec.encode(torch.ones(64, dtype=torch.int64))
    with pytest.raises(CodecError, match="call `contiguous"):
        codec.encode(torch.ones(8, 8).t())
    with pytest.raises(CodecError, match=f"it needs {codec.size(64)} of uint8 on cpu"):
        codec.encode(values, torch.empty(3, dtype=torch.uint8))
    with pytest.raises(CodecError, match=f"they take {codec.size(65)} of uint8"):
        codec.decode(torch.empty(codec.size(65) - 1, dtype=torch.uint8), 65, torch.float32)
    with pytest.raises(CodecError, match=r"decode to torch\.int8"):
        codec.decode(codec.encode(values), 64, torch.int8)

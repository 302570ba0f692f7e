"""Differences of weights: exact, small where little changed, refused where damaged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.weights import sparse_delta

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def weights(count, dtype, seed):
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def moved(old, share, most, seed=1):
    """A copy, a share of whose values is up to `most` units in the last place away."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(len(old), generator=generator) < share
    new = old.clone()
    units = torch.randint(1, most + 1, (int(chosen.sum()),), generator=generator)
    new.view(BITS[old.dtype])[chosen] += units.to(BITS[old.dtype])
    return new


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@given(
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
    st.sampled_from([1, 200, 40_000]),
    st.sampled_from(list(BITS)),
)
def test_every_difference_is_exact_and_never_larger_than_the_buffer(count, share, most, dtype):
    old = weights(count, dtype, 0)
    new = moved(old, share, min(most, torch.iinfo(BITS[dtype]).max))
    before = old.clone()
    data = sparse_delta.encode_sparse_delta(old, new)
    assert same_bits(sparse_delta.decode_sparse_delta(data, old), new) and same_bits(old, before)
    assert len(data) <= new.nbytes + sparse_delta.HEADER_BYTES
    apart = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]  # not aligned
    assert same_bits(sparse_delta.decode_sparse_delta(apart, old), new)


@given(st.lists(st.integers(0, 2**16 - 1), max_size=40), st.lists(st.integers(0, 2**16 - 1)))
def test_all_patterns_of_bits_are_values(old, new):
    size = min(len(old), len(new))
    old, new = (
        torch.tensor(bits[:size]).to(torch.int16).view(torch.bfloat16) for bits in (old, new)
    )
    assert same_bits(
        sparse_delta.decode_sparse_delta(sparse_delta.encode_sparse_delta(old, new), old), new
    )


@pytest.mark.parametrize("where", [0, 254, 255, 256, 509, 510, 511, 1019, 1020])
def test_a_single_change_is_found_at_the_ends_of_gaps(where):
    old = weights(1021, torch.bfloat16, 0)
    new = old.clone()
    new[where] = 7.0
    data = sparse_delta.encode_sparse_delta(old, new)
    assert same_bits(sparse_delta.decode_sparse_delta(data, old), new)
    assert len(data) < 45


@pytest.mark.parametrize(("share", "smaller"), [(0.03, 32), (0.1, 9.5), (0.2, 6), (0.5, 3)])
def test_bytes_of_bfloat16_by_the_share_that_changed(share, smaller):
    """Both codings of places have their range; a few values are far away, and cost three bytes."""
    old = weights(100_000, torch.bfloat16, 0)
    new = moved(old, share, 2)
    new[::20_000] = 1.0
    data = sparse_delta.encode_sparse_delta(old, new)
    assert new.nbytes / len(data) > smaller
    assert same_bits(sparse_delta.decode_sparse_delta(data, old), new)


@given(st.integers(0, 10_000), st.integers(0, 7), st.sampled_from([0.01, 0.4]))
def test_what_is_damaged_is_refused_or_gives_other_values(at, bit, share):
    old = weights(504, torch.bfloat16, 0)  # no bits of a mask are left over
    new = moved(old, share, 2)
    data = sparse_delta.encode_sparse_delta(old, new)
    data[at % len(data)] ^= 1 << bit
    try:
        found = sparse_delta.decode_sparse_delta(data, old)
    except ValueError:
        return
    assert not same_bits(found, new) or at % len(data) < sparse_delta.HEADER_BYTES


def test_what_is_cut_off_is_refused():
    old = weights(500, torch.bfloat16, 0)
    data = sparse_delta.encode_sparse_delta(old, moved(old, 0.1, 2))
    for length in (0, 31, len(data) - 1):
        with pytest.raises(ValueError, match="bytes are"):
            sparse_delta.decode_sparse_delta(data[:length], old)
    with pytest.raises(ValueError, match="500 values do not become 499"):
        sparse_delta.encode_sparse_delta(old, old[1:])

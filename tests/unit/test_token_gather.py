"""Which rank reads what the model says of which response token."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.parallel.sequence_parallel import TokenOwnership
from hybridrl.parallel.zigzag import compute_rank_positions, split_over_ring

SAMPLES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6)


@given(SAMPLES, st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
def test_every_response_token_is_read_once_and_comes_back_in_order(samples, ring, ulysses, shift):
    cu_seqlens = torch.tensor([0, *itertools.accumulate(map(sum, samples))])
    prompts, responses = torch.tensor(samples).unbind(1)
    read_at = concatenate_ranges(cu_seqlens[:-1] + prompts - 1 + shift, responses)
    places = compute_rank_positions(split_over_ring(cu_seqlens, ring), ulysses)
    readings = [
        TokenOwnership.of(read_at, places, rank, torch.device("cpu")) for rank in range(len(places))
    ]
    most = readings[0].most
    assert most == max(len(reading.mine) for reading in readings)
    gathered = torch.full((len(places), most), -1)
    for rank, reading in enumerate(readings):
        assert torch.equal(places[rank][reading.local], read_at[reading.mine])
        gathered[rank, : len(reading.mine)] = read_at[reading.mine]
        assert torch.equal(reading.slots, readings[0].slots) and reading.most == most
    assert torch.equal(gathered.flatten()[readings[0].slots], read_at)

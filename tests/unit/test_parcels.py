"""Rounds of bounded size, and plans executed in one process and between groups."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import empty_tensors, full_tensors, layout_pairs, numbered

from hybridrl.core.boxes import extent, volume
from hybridrl.core.layout import Layout, Move, Place, local_pieces, plan
from hybridrl.errors import ConfigError, LayoutError
from hybridrl.reshard.between_groups import send_parcels, take_parcels
from hybridrl.reshard.in_process import reshard_in_process
from hybridrl.reshard.parcels import Traffic, count, into, rounds, split

FLOAT = torch.float32


def row_shards(ranks, rows=64, columns=3):
    """One tensor, cut by rows."""
    height = rows // ranks
    spans = [(height * rank, height * (rank + 1)) for rank in range(ranks)]
    pieces = {r: {"w": local_pieces("w", (span, (0, columns)))} for r, span in enumerate(spans)}
    return Layout({"w": (rows, columns)}, pieces)


def whole_copies(ranks, rows=64, columns=3):
    here = {"w": local_pieces("w", ((0, rows), (0, columns)))}
    return Layout({"w": (rows, columns)}, dict.fromkeys(range(ranks), here))


@given(layout_pairs(), st.integers(2, 40))
def test_rounds_are_bounded_and_hold_every_element_once(pair, bucket):
    found = plan(*pair)
    exchanges = rounds(found, bucket)
    moved = Counter()
    for moves in exchanges:
        assert moves
        load = Counter()
        for move in moves:
            load["sends", move.sender] += volume(move.box)
            load["receives", move.receiver] += volume(move.box)
            moved[move.sender, move.receiver, move.name] += volume(move.box)
        assert max(load.values()) <= bucket // 2
        ends = [(move.sender, move.receiver) for move in moves]
        assert ends == sorted(ends)
    wanted = Counter()
    for move in found.moves:
        wanted[move.sender, move.receiver, move.name] += volume(move.box)
    assert moved == wanted


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(1, 20))
def test_parts_of_a_move_fit_and_keep_their_places(shape, most):
    box = tuple((2, 2 + length) for length in shape)
    start = (5,) * len(shape)
    move = Move("w", box, 0, 1, Place("a", start), Place("b", (0,) * len(shape)))
    parts = list(split(move, most))
    assert all(volume(part.box) <= most for part in parts)
    assert sum(volume(part.box) for part in parts) == volume(box)
    for part in parts:
        offset = tuple(low - 2 for low, _ in part.box)
        assert part.source == Place("a", tuple(5 + by for by in offset))
        assert part.target == Place("b", offset)


def test_a_move_is_cut_along_its_longest_dim():
    move = Move("w", ((0, 2), (0, 9)), 0, 1, Place("w", (0, 0)), Place("w", (0, 0)))
    assert [extent(part.box) for part in split(move, 8)] == [(2, 4), (2, 4), (2, 1)]


def test_all_ranks_work_in_nearly_every_round():
    """Eight ranks gather a large tensor; no order of rounds needs fewer than `ideal`."""
    found = plan(row_shards(8, rows=8 * 64), whole_copies(8, rows=8 * 64))
    bucket = 3 * 16
    ideal = 2 * found.received()[0] / bucket
    assert len(rounds(found, bucket)) <= 1.25 * ideal


def test_both_directions_are_used_at_once():
    exchanges = rounds(plan(row_shards(2), whole_copies(2)), 48)
    assert len(exchanges) == 4
    for moves in exchanges:
        assert {move.sender for move in moves} == {0, 1}


def test_a_bucket_holds_at_least_two_elements():
    found = plan(row_shards(2), whole_copies(2))
    assert max(move.buffer for move in count(found, FLOAT, 8).values()) == 8
    with pytest.raises(ConfigError, match=r"bucket_bytes=7 cannot hold.*Set it to 8 or more"):
        count(found, FLOAT, 7)


def tensors_of(pair):
    """(values, source tensors, empty target tensors), the last two by rank."""
    source, target = pair
    values = numbered(source)
    full = {rank: full_tensors(source, rank, values) for rank in source.pieces}
    return values, full, {rank: empty_tensors(target, rank) for rank in target.pieces}


def assert_complete(target, values, found):
    for rank, tensors in found.items():
        wanted = full_tensors(target, rank, values)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@given(layout_pairs(), st.integers(8, 160))
def test_in_one_process(pair, bucket_bytes):
    values, full, empty = tensors_of(pair)
    found = plan(*pair)
    traffic = reshard_in_process(
        found,
        {rank: tensors.__getitem__ for rank, tensors in full.items()},
        {rank: into(tensors) for rank, tensors in empty.items()},
        FLOAT,
        bucket_bytes,
    )
    assert_complete(pair[1], values, empty)
    assert sum(each.received for each in traffic.values()) == 4 * found.received().total()
    copied = sum(volume(move.box) for move in found.copies)
    assert sum(each.copied for each in traffic.values()) == 4 * copied


def test_own_values_are_rounded_like_those_of_others():
    """One rank copies, the other receives: both end with the same bits."""
    source, target = row_shards(1), whole_copies(2)
    values = {"w": torch.rand(64, 3)}
    found = {rank: {"w": torch.empty(64, 3)} for rank in range(2)}
    writes = {rank: into(tensors) for rank, tensors in found.items()}
    reshard_in_process(plan(source, target), {0: values.get}, writes, torch.bfloat16, 64)
    assert torch.equal(found[0]["w"], values["w"].bfloat16().float())
    assert torch.equal(found[0]["w"], found[1]["w"])


def send_all(found, full, dtype=FLOAT, bucket_bytes=160):
    return [
        parcel
        for rank, tensors in full.items()
        for parcel in send_parcels(found, rank, tensors.__getitem__, dtype, bucket_bytes)
    ]


@given(layout_pairs(disjoint_ranks=True), st.integers(8, 160), st.randoms(use_true_random=False))
def test_between_groups_in_any_order(pair, bucket_bytes, chance):
    values, full, empty = tensors_of(pair)
    found = plan(*pair)
    parcels = send_all(found, full, bucket_bytes=bucket_bytes)
    assert all(2 * parcel.data.nbytes <= bucket_bytes for parcel in parcels)
    chance.shuffle(parcels)
    for rank, tensors in empty.items():
        mine = [parcel for parcel in parcels if parcel.receiver == rank]
        traffic = take_parcels(found, rank, into(tensors), mine, FLOAT, bucket_bytes)
        assert traffic.received == 4 * found.received()[rank]
    assert_complete(pair[1], values, empty)


def test_parcels_are_cast_by_the_sender():
    source, target = row_shards(2), whole_copies(1).shifted(2)
    values = {"w": torch.rand(64, 3)}
    found = plan(source, target)
    full = {rank: {"w": values["w"][32 * rank : 32 * rank + 32]} for rank in range(2)}
    parcels = send_all(found, full, torch.bfloat16)
    assert sum(parcel.data.nbytes for parcel in parcels) == 2 * 64 * 3
    here = {"w": torch.empty(64, 3, dtype=torch.bfloat16)}
    take_parcels(found, 2, into(here), parcels, torch.bfloat16, 160)
    assert torch.equal(here["w"], values["w"].bfloat16())


def test_lost_and_strange_parcels_are_sentences():
    source, target = row_shards(2), whole_copies(2).shifted(2)
    found = plan(source, target)
    full = {rank: {"w": torch.rand(32, 3)} for rank in range(2)}
    write = into({"w": torch.empty(64, 3)})
    everything = send_all(found, full)
    mine = [parcel for parcel in everything if parcel.receiver == 2]
    random.Random(0).shuffle(mine)

    def take(parcels):
        take_parcels(found, 2, write, parcels, FLOAT, 160)

    with pytest.raises(LayoutError, match="1 parcels for rank 2 never came"):
        take(mine[1:])
    with pytest.raises(LayoutError, match="rank 2 expected 0"):
        take([*mine, mine[0]])
    with pytest.raises(LayoutError, match="rank 2 expected 0"):
        take(everything)
    with pytest.raises(LayoutError, match="rank 2 expected"):
        take([mine[0]._replace(data=mine[0].data[:4]), *mine[1:]])
    with pytest.raises(LayoutError, match=r"copies inside rank 0.*shifted"):
        next(send_parcels(plan(source, whole_copies(2)), 0, full[0].get, FLOAT))


def test_counts_are_by_rank():
    found = plan(row_shards(4), whole_copies(4))
    size = 64 * 3 * 4
    each = Traffic(received=size * 3 // 4, sent=size * 3 // 4, copied=size // 4, rounds=1)
    large = count(found, FLOAT, math.prod((2, size)))
    assert large == {rank: replace(each, buffer=2 * each.received) for rank in range(4)}

"""Rounds of bounded size, and plans executed in one process and between groups."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import empty_tensors, full_tensors, layout_pairs, numbered
from reshard_prediction import count, max_load, reshard_in_process
from weight_transitions import count_received

from hybridrl.errors import ConfigError, LayoutError
from hybridrl.layout.box_table import slice_at
from hybridrl.layout.boxes import Place, box_numel, box_shape, make_local_pieces
from hybridrl.layout.tensor_layout import (
    TensorLayout,
    TensorMove,
    TransferTraffic,
    make_tensor_sink,
)
from hybridrl.layout.transfer_planner import plan_transfer
from hybridrl.weights.parcel_transfer import (
    ParcelReceiver,
    ParcelSender,
    RoundSchedule,
    compute_rank_loads,
    group_into_streams,
    schedule,
    split_stream,
)

FLOAT = torch.float32


def row_shards(ranks, rows=64, columns=3):
    """One tensor, cut by rows."""
    height = rows // ranks
    spans = [(height * rank, height * (rank + 1)) for rank in range(ranks)]
    pieces = {
        r: {"w": make_local_pieces("w", (span, (0, columns)))} for r, span in enumerate(spans)
    }
    return TensorLayout({"w": (rows, columns)}, pieces)


def whole_copies(ranks, rows=64, columns=3):
    here = {"w": make_local_pieces("w", ((0, rows), (0, columns)))}
    return TensorLayout({"w": (rows, columns)}, dict.fromkeys(range(ranks), here))


def room_for(found, extra):
    """Room for all messages of a round and `extra` elements."""
    return max_load(compute_rank_loads(group_into_streams(found.moves)).values()).messages + extra


@given(layout_pairs(), st.integers(1, 40))
def test_rounds_are_bounded_and_every_rank_finds_its_own(pair, extra):
    found = plan_transfer(*pair)
    room = room_for(found, extra)
    loads = compute_rank_loads(group_into_streams(found.moves))
    cut = schedule(max_load(loads.values()), room)
    mine = {
        rank: [
            (each, split_stream(each, cut))
            for each in group_into_streams(plan_transfer(*pair, rank).moves)
        ]
        for rank in loads
    }
    for rank, streams in mine.items():
        assert compute_rank_loads([stream for stream, _ in streams])[rank] == loads[rank]
        load = Counter()
        for stream, parts in streams:
            for number, moves in enumerate(parts):
                size = sum(box_numel(move.box) for move in moves)
                copies = len(stream.receivers) if stream.sender == rank else 1
                load[stream.sender == rank, number] += size * copies
                for other in {stream.sender, *stream.receivers} & mine.keys():
                    assert (stream, parts) in mine[other]
        assert max(load.values()) <= room
    moved, wanted = Counter(), Counter()
    for stream in group_into_streams(found.moves):
        for move in itertools.chain(*split_stream(stream, cut)):
            moved[move.sender, move.receivers, move.name] += box_numel(move.box)
        for move in stream.moves:
            wanted[move.sender, move.receivers, move.name] += box_numel(move.box)
    assert moved == wanted


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(1, 9), st.integers(0, 5))
def test_parts_of_a_stream_keep_their_order_and_places(shape, rounds, grain):
    box = tuple((2, 2 + length) for length in shape)
    start = (5,) * len(shape)
    moves = [
        TensorMove(name, box, 0, (1,), Place(name, start), Place(name, (0,) * len(shape)))
        for name in ("a", "b")
    ]
    (stream,) = group_into_streams(moves)
    parts = split_stream(stream, RoundSchedule(rounds, grain))
    assert len(parts) == rounds
    size = stream.size / rounds + 1 + grain
    assert all(sum(box_numel(move.box) for move in part) <= size for part in parts)
    numbers = {name: torch.arange(math.prod(shape)).reshape(shape) for name in ("a", "b")}
    found = {"a": [], "b": []}
    for move in itertools.chain(*parts):
        offset = tuple(low - 2 for low, _ in move.box)
        assert move.source == Place(move.name, tuple(5 + by for by in offset))
        assert move.target == Place(move.name, offset)
        found[move.name] += (
            slice_at(numbers[move.name], offset, box_shape(move.box)).flatten().tolist()
        )
    assert found == {name: list(range(math.prod(shape))) for name in ("a", "b")}


def test_parts_end_with_rows_where_there_is_room():
    move = TensorMove("w", ((0, 10), (0, 6)), 0, (1,), Place("w", (0, 0)), Place("w", (0, 0)))
    (stream,) = group_into_streams([move])
    exact = split_stream(stream, RoundSchedule(4, 0))
    assert [[box_shape(each.box) for each in part] for part in exact] == [
        [(2, 6), (1, 3)],
        [(1, 3), (2, 6)],
        [(2, 6), (1, 3)],
        [(1, 3), (2, 6)],
    ]
    whole = split_stream(stream, RoundSchedule(4, 3))
    assert [[box_shape(each.box) for each in part] for part in whole] == [
        [(2, 6)],
        [(3, 6)],
        [(2, 6)],
        [(3, 6)],
    ]


def test_all_ranks_work_in_nearly_every_round():
    """Eight ranks gather a large tensor; no order of rounds needs fewer than `ideal`."""
    found = plan_transfer(row_shards(8, rows=8 * 64), whole_copies(8, rows=8 * 64))
    ideal = count_received(found)[0] / 100
    most = max_load(compute_rank_loads(group_into_streams(found.moves)).values())
    assert schedule(most, 100).rounds <= 1.25 * ideal


def test_what_goes_to_many_is_one_stream():
    found = plan_transfer(row_shards(4), whole_copies(4))
    streams = group_into_streams(found.moves)
    assert [stream.sender for stream in streams] == [0, 1, 2, 3]
    assert [len(stream.receivers) for stream in streams] == [3, 3, 3, 3]


def test_a_bucket_holds_an_element_of_every_message():
    found = plan_transfer(row_shards(4), whole_copies(4))
    assert max(each.buffer for each in count(found, FLOAT, 16 * 4).values()) <= 16 * 4
    with pytest.raises(ConfigError, match=r"bucket_bytes=15 cannot hold.*Set it to 16 or more"):
        count(found, FLOAT, 15)
    with pytest.raises(ConfigError, match=r"3 messages at once.*room for 3 elements"):
        count(found, FLOAT, 16 * 3)


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


@given(layout_pairs(), st.integers(1, 40))
def test_in_one_process(pair, extra):
    values, full, empty = tensors_of(pair)
    found = plan_transfer(*pair)
    bucket_bytes = 16 * room_for(found, extra)
    traffic = reshard_in_process(
        found,
        {rank: tensors.__getitem__ for rank, tensors in full.items()},
        {rank: make_tensor_sink(tensors) for rank, tensors in empty.items()},
        FLOAT,
        bucket_bytes,
    )
    assert_complete(pair[1], values, empty)
    assert sum(each.received for each in traffic.values()) == 4 * count_received(found).total()
    copied = sum(box_numel(move.box) for move in found.copies)
    assert sum(each.copied for each in traffic.values()) == 4 * copied


def test_own_values_are_rounded_like_those_of_others():
    """One rank copies, the other receives: both end with the same bits."""
    source, target = row_shards(1), whole_copies(2)
    values = {"w": torch.rand(64, 3)}
    found = {rank: {"w": torch.empty(64, 3)} for rank in range(2)}
    writes = {rank: make_tensor_sink(tensors) for rank, tensors in found.items()}
    reshard_in_process(plan_transfer(source, target), {0: values.get}, writes, torch.bfloat16, 64)
    assert torch.equal(found[0]["w"], values["w"].bfloat16().float())
    assert torch.equal(found[0]["w"], found[1]["w"])


def send_all(found, ranks, tensors, dtype=FLOAT, parcel_bytes=80):
    """All parcels, and the manifests of their senders."""
    senders = {rank: ParcelSender(found, rank, dtype, parcel_bytes) for rank in ranks}
    parcels = [p for r, sender in senders.items() for p in sender.pack(tensors[r].__getitem__)]
    return parcels, {rank: sender.manifest for rank, sender in senders.items()}


@given(layout_pairs(disjoint_ranks=True), st.integers(8, 160), st.randoms(use_true_random=False))
def test_between_groups_in_any_order(pair, parcel_bytes, chance):
    values, full, empty = tensors_of(pair)
    parcels, manifests = send_all(plan_transfer(*pair), full, full, FLOAT, parcel_bytes)
    assert all(data.nbytes <= parcel_bytes for _, data in parcels)
    chance.shuffle(parcels)
    for rank, tensors in empty.items():
        own = plan_transfer(*pair, rank)
        receiver = ParcelReceiver(own, rank, FLOAT, manifests, parcel_bytes)
        mine = [(key, data) for key, data in parcels if key in receiver.wanted]
        traffic = receiver.take(make_tensor_sink(tensors), mine)
        assert traffic.received == 4 * count_received(own)[rank]
        assert traffic.received == sum(data.nbytes for _, data in mine)
    assert_complete(pair[1], values, empty)


def test_what_many_need_is_sent_once():
    """Four shards, four copies, of which each is the whole tensor."""
    source, target = row_shards(4), whole_copies(4).shifted(4)
    full = {rank: {"w": torch.rand(16, 3)} for rank in range(4)}
    parcels, _ = send_all(plan_transfer(source, target), range(4), full)
    assert sum(data.nbytes for _, data in parcels) == 64 * 3 * 4


def test_parcels_are_cast_by_the_sender():
    source, target = row_shards(2), whole_copies(1).shifted(2)
    values = {"w": torch.rand(64, 3)}
    found = plan_transfer(source, target)
    full = {rank: {"w": values["w"][32 * rank : 32 * rank + 32]} for rank in range(2)}
    parcels, manifests = send_all(found, full, full, torch.bfloat16)
    assert sum(data.nbytes for _, data in parcels) == 2 * 64 * 3
    here = {"w": torch.empty(64, 3, dtype=torch.bfloat16)}
    ParcelReceiver(found, 2, torch.bfloat16, manifests, 80).take(make_tensor_sink(here), parcels)
    assert torch.equal(here["w"], values["w"].bfloat16())


def test_lost_and_strange_parcels_are_sentences():
    """The first receiver needs the first half, so that not all parcels are for it."""
    source, target = row_shards(2), row_shards(2).shifted(2)
    found = plan_transfer(source, target)
    full = {rank: {"w": torch.rand(32, 3)} for rank in range(2)}
    write = make_tensor_sink({"w": torch.empty(32, 3)})
    everything, manifests = send_all(found, full, full)
    receiver = ParcelReceiver(found, 2, FLOAT, manifests, 80)
    mine = [(key, data) for key, data in everything if key in receiver.wanted]
    assert 1 < len(mine) < len(everything)

    def take(parcels):
        receiver.take(write, parcels)

    with pytest.raises(LayoutError, match="1 parcels for rank 2 never came"):
        take(mine[1:])
    with pytest.raises(LayoutError, match="rank 2 expected 0"):
        take([*mine, mine[0]])
    with pytest.raises(LayoutError, match="rank 2 expected 0"):
        take(everything)
    with pytest.raises(LayoutError, match="rank 2 expected"):
        take([(mine[0][0], mine[0][1][:4]), *mine[1:]])
    with pytest.raises(LayoutError, match="Rank 0 does not send what rank 2 needs in"):
        ParcelReceiver(found, 2, FLOAT, manifests, 40)
    with pytest.raises(LayoutError, match=r"copies inside rank 0.*shifted"):
        ParcelSender(plan_transfer(source, whole_copies(2)), 0, FLOAT)


def test_counts_are_by_rank():
    found = plan_transfer(row_shards(4), whole_copies(4))
    size = 64 * 3 * 4
    each = TransferTraffic(received=size * 3 // 4, sent=size * 3 // 4, copied=size // 4, rounds=1)
    large = count(found, FLOAT, 4 * size)
    assert large == {rank: replace(each, buffer=2 * each.received) for rank in range(4)}

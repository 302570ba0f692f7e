"""Boxes, layouts and plans, against brute force over single elements."""

import itertools
import math
import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import (
    boxes_in,
    cut,
    elements,
    full_tensors,
    layout_pairs,
    local,
    numbered,
    shapes,
)
from torch.utils._python_dispatch import TorchDispatchMode
from weight_transitions import count_received, count_sent, even_range, flat_pieces, shard_box

from hybridrl.errors import ConfigError, LayoutError
from hybridrl.layout import boxes
from hybridrl.layout.boxes import Part, Piece, PieceTable, Place, make_local_pieces
from hybridrl.layout.tensor_layout import (
    TensorLayout,
    compute_peak_elements,
    compute_redundant_elements,
    copy_moves,
    make_tensor_sink,
    merge_layouts,
    pack_moves,
    unpack_moves,
)
from hybridrl.layout.transfer_planner import plan_transfer


def points(box):
    return set(itertools.product(*(range(*span) for span in box)))


@given(st.data(), shapes)
def test_what_is_left_of_a_box_is_disjoint_and_complete(data, shape):
    box, hole, other = (data.draw(boxes_in(shape)) for _ in range(3))
    shared = boxes.intersect_boxes(box, hole)
    assert (set() if shared is None else points(shared)) == points(box) & points(hole)
    left = boxes.subtract_boxes(box, [hole, other])
    assert sum(map(boxes.box_numel, left)) == len(points(box) - points(hole) - points(other))
    assert set().union(*map(points, left)) == points(box) - points(hole) - points(other)
    together = boxes.make_disjoint([box, hole, other])
    assert sum(map(boxes.box_numel, together)) == len(points(box) | points(hole) | points(other))


@given(st.data(), shapes)
def test_a_flat_range_is_few_boxes_in_order(data, shape):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = boxes.flat_range_boxes(shape, start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    numbers = torch.arange(size).reshape(shape)
    flat = [int(n) for box in found for n in cut(numbers, box).flatten()]
    assert flat == list(range(start, stop))


def test_a_range_outside_of_the_tensor_is_refused():
    with pytest.raises(ConfigError, match=r"5 to 7 are not a range.*\(2, 3\)"):
        boxes.flat_range_boxes((2, 3), 5, 7)


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_follow_torch(length, count):
    numbers = torch.arange(length)
    chunks = [*numbers.chunk(count), *[numbers[:0]] * count][:count]
    for index, (chunk, even) in enumerate(zip(chunks, numbers.tensor_split(count), strict=True)):
        assert torch.equal(numbers[slice(*boxes.chunk_range(length, index, count))], chunk)
        assert torch.equal(numbers[slice(*even_range(length, index, count))], even)


def test_two_cuts_of_one_dim_are_nested():
    assert shard_box((10, 4), [(0, 1, 2), (0, 2, 3)]) == ((9, 10), (0, 4))
    assert shard_box((10, 4), [(0, 1, 2), (1, 0, 2)]) == ((5, 10), (0, 2))
    assert shard_box((10,), [(0, 3, 4)], even_range) == ((8, 10),)
    with pytest.raises(ConfigError, match="Part 2 of 2 along dim 0"):
        shard_box((10,), [(0, 2, 2)])


@given(layout_pairs())
def test_every_target_element_is_written_once_by_a_rank_that_has_it(pair):
    source, target = pair
    found = plan_transfer(source, target)
    values = numbered(target)
    before = {rank: full_tensors(source, rank, values) for rank in source.pieces}
    written = Counter()
    for move in (*found.moves, *found.copies):
        assert (move.receivers == (move.sender,)) == (move in found.copies)
        assert move in found.copies or move.sender not in move.receivers
        sent = cut(values[move.name], move.box)
        here = local(before[move.sender][move.source.tensor], Piece(move.box, *move.source))
        assert torch.equal(here, sent)
        starts = itertools.product(*(range(n) for n in boxes.box_shape(move.box)))
        for offset, number in zip(starts, sent.flatten().tolist(), strict=True):
            at = tuple(a + b for a, b in zip(move.target.start, offset, strict=True))
            for receiver in move.receivers:
                written[receiver, move.target.tensor, at, number] += 1
    wanted = Counter(
        (rank, piece.tensor, tuple(a + b for a, b in zip(piece.start, offset, strict=True)), n)
        for rank, of_rank in target.pieces.items()
        for name, pieces in of_rank.items()
        for piece in pieces
        for offset, n in zip(
            itertools.product(*(range(n) for n in boxes.box_shape(piece.box))),
            cut(values[name], piece.box).flatten().tolist(),
            strict=True,
        )
    )
    assert written == wanted
    assert set(written.values()) <= {1}


@given(layout_pairs())
def test_no_element_is_sent_to_a_rank_that_has_it(pair):
    source, target = pair
    found = plan_transfer(source, target)
    values = numbered(target)
    for rank, of_rank in target.pieces.items():
        has = elements(source, rank)
        lacks = [
            number
            for name, pieces in of_rank.items()
            for piece in pieces
            for number in cut(values[name], piece.box).flatten().tolist()
            if number not in has
        ]
        assert count_received(found)[rank] == len(lacks)
    assert sum(count_sent(found).values()) == sum(count_received(found).values())


@given(layout_pairs())
def test_plans_do_not_depend_on_the_order_of_ranks(pair):
    source, target = pair
    found = plan_transfer(source, target)
    backwards = [
        TensorLayout(
            dict(reversed(layout.shapes.items())),
            {rank: dict(reversed(p.items())) for rank, p in reversed(layout.pieces.items())},
        )
        for layout in pair
    ]
    assert plan_transfer(*backwards) == found


@given(layout_pairs())
def test_footprints_count_elements_once(pair):
    source, target = pair
    for rank in source.pieces.keys() | target.pieces.keys():
        before, after = elements(source, rank), elements(target, rank)
        assert compute_peak_elements(source, target)[rank] == len(before | after)
        if rank in source.pieces:
            assert compute_peak_elements(source)[rank] == len(before)
            assert compute_redundant_elements(source, target)[rank] == len(before - after)


def shards(shape, count, replicas=1):
    """A tensor cut along dim 0, on ranks side by side, several times."""
    return TensorLayout(
        {"w": shape},
        {
            rank: {"w": make_local_pieces("w", shard_box(shape, [(0, rank % count, count)]))}
            for rank in range(count * replicas)
        },
    )


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_share_the_work_and_each_stays_with_its_own(replicas):
    source = shards((8, 3), 4, replicas)
    target = shards((8, 3), 1, 4 * replicas)
    found = plan_transfer(source, target)
    assert set(count_sent(found).values()) == {3 * 6}
    for move in found.moves:
        assert {receiver // 4 for receiver in move.receivers} == {move.sender // 4}


@pytest.mark.parametrize("receivers", [1, 2, 3])
def test_who_holds_the_same_sends_as_much(receivers):
    """Two ranks hold eight tensors of different sizes, in different places of their memory."""
    shapes = {f"{i}": (2 + i,) for i in range(8)}
    here = {name: make_local_pieces(name, boxes.full_box(shape)) for name, shape in shapes.items()}
    there = {name: (Piece(boxes.full_box(s), "flat", (7,)),) for name, s in shapes.items()}
    source = TensorLayout(shapes, {0: here, 1: there})
    target = TensorLayout(shapes, dict.fromkeys(range(2, 2 + receivers), here))
    sent = count_sent(plan_transfer(source, target))
    assert abs(sent[0] - sent[1]) <= max(2 + i for i in range(8))
    assert sent.total() == receivers * sum(2 + i for i in range(8))


@given(layout_pairs())
def test_a_rank_finds_its_own_part_of_the_plan(pair):
    found = plan_transfer(*pair)
    for rank in {*pair[0].pieces, *pair[1].pieces, 99}:
        assert plan_transfer(*pair, rank) == found.of(rank)


def test_the_source_of_everything_is_looked_for_by_every_rank():
    """Or one would raise, and the others wait for it."""
    target = shards((8, 3), 2)
    source = TensorLayout(target.shapes, {0: {"w": make_local_pieces("w", ((0, 7), (0, 3)))}})
    for rank in range(3):
        with pytest.raises(LayoutError, match="which rank 1 of the target"):
            plan_transfer(source, target, rank)


def test_what_all_hold_is_given_by_those_who_generate_with_the_same():
    """Two copies cut in two, for two more: a norm, which is not cut, comes from where the matrices
    come from."""
    shapes = {"matrix": (8, 3), "norm": (4,)}
    pieces = {}
    for rank in range(8):
        half = shard_box((8, 3), [(0, rank % 2, 2)])
        pieces[rank] = {
            "matrix": make_local_pieces("m", half),
            "norm": make_local_pieces("n", ((0, 4),)),
        }
    source = TensorLayout(shapes, {rank: pieces[rank] for rank in range(4)})
    found = plan_transfer(source, TensorLayout(shapes, pieces))
    for name in shapes:
        moves = [move for move in found.moves if move.name == name]
        ends = {(move.sender, move.receivers) for move in moves}
        assert ends == {(0, (4,)), (1, (5,)), (2, (6,)), (3, (7,))}


def test_ranks_may_call_their_tensors_as_they_like():
    """Both tensors lie alike; of the second each rank has a name of its own."""
    whole = ((0, 4),)
    source = TensorLayout(
        {"a": (4,), "b": (4,)}, {0: {n: make_local_pieces(n, whole) for n in "ab"}}
    )
    target = TensorLayout(
        source.shapes,
        {
            rank: {
                "a": make_local_pieces("a", whole),
                "b": make_local_pieces(f"b of {rank}", whole),
            }
            for rank in (1, 2)
        },
    )
    found = {(m.name, m.target.tensor, m.receivers) for m in plan_transfer(source, target).moves}
    assert found == {("a", "a", (1, 2)), ("b", "b of 1", (1,)), ("b", "b of 2", (2,))}


@st.composite
def tables(draw):
    """A table, and the same with everything in dictionaries."""
    ranks = tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1))))
    shape = (6, 5)

    def pieces():
        found = draw(st.lists(boxes_in(shape), max_size=2))
        return tuple(Piece(box, f"/{i}" * i, (i, 0)) for i, box in enumerate(found))

    columns = tuple(tuple(pieces() for _ in ranks) for _ in range(draw(st.integers(1, 3))))
    columns_of = st.integers(0, len(columns) - 1)
    tensors = {f"t{i}": (f"local{i}", draw(columns_of)) for i in range(draw(st.integers(1, 4)))}
    table = PieceTable(ranks, columns, tensors)
    shapes = dict.fromkeys(tensors, shape)
    pieces = {
        rank: {
            name: tuple(Piece(b, begin + end, at) for b, end, at in columns[column][place])
            for name, (begin, column) in tensors.items()
        }
        for place, rank in enumerate(ranks)
    }
    return TensorLayout(shapes, table), TensorLayout(shapes, pieces)


def first_rows(piece):
    """What of a piece is in the first three rows, as a tensor of its own."""
    shared = boxes.intersect_boxes(piece.box, ((0, 3), (0, 5)))
    if shared is None:
        return None
    place = piece.at(shared)
    return Piece(shared, f"{place.tensor}/first", place.start)


def plain(layout):
    """Its pieces in dictionaries, without those that are none."""
    return {
        rank: {name: held for name, held in here.items() if held}
        for rank, here in layout.pieces.items()
    }


@given(tables())
def test_tables_of_pieces_are_layouts(pair):
    short, long = pair
    assert plain(short) == plain(long)
    assert plain(short.shifted(3)) == plain(long.shifted(3))
    names = {name: f"new.{name}" for name in list(short.shapes)[::2]}
    assert plain(short.renamed(names)) == plain(long.renamed(names))
    assert list(short.renamed(names).shapes) == list(names.values())
    parts = {f"{name}/head": Part(name, (3, 5), "head", first_rows) for name in short.shapes}
    parts["again"] = next(iter(parts.values()))._replace(kind="other", piece=lambda piece: piece)
    assert plain(short.parts(parts)) == plain(long.parts(parts))
    target = TensorLayout(long.shapes, {rank + 1: here for rank, here in long.pieces.items()})
    assert plan_transfer(short, target) == plan_transfer(long, target)
    assert 99 not in short.pieces
    assert short.of(99).pieces == {}


def test_fused_parameters_and_replicated_heads():
    """Training cuts q and k in two; generation on four ranks fuses them, two ranks per k head."""
    source = TensorLayout(
        {"q": (8, 2), "k": (4, 2)},
        {
            rank: {
                "q": make_local_pieces("q", ((4 * rank, 4 * rank + 4), (0, 2))),
                "k": make_local_pieces("k", ((2 * rank, 2 * rank + 2), (0, 2))),
            }
            for rank in range(2)
        },
    )
    target = TensorLayout(
        source.shapes,
        {
            rank: {
                "q": (Piece(((2 * rank, 2 * rank + 2), (0, 2)), "qk", (0, 0)),),
                "k": (Piece(((rank // 2 * 2, rank // 2 * 2 + 2), (0, 2)), "qk", (2, 0)),),
            }
            for rank in range(4)
        },
    )
    found = plan_transfer(source, target)
    assert count_received(found) == {1: 8, 2: 8, 3: 8}
    keys = [move for move in found.moves if move.name == "k" and 3 in move.receivers]
    assert [(move.sender, move.source, move.target) for move in keys] == [
        (1, Place("k", (0, 0)), Place("qk", (2, 0)))
    ]


def test_flat_shards_are_views_of_runs():
    pieces = flat_pieces("w", (3, 4), 2, 11)
    assert [piece.tensor for piece in pieces] == ["w/0", "w/1", "w/2"]
    assert [boxes.box_numel(piece.box) for piece in pieces] == [2, 4, 3]
    assert make_local_pieces("w", ((2, 2), (0, 4))) == ()


def test_each_rank_may_describe_itself():
    layout = shards((8, 3), 4)
    alone = [TensorLayout(layout.shapes, {rank: here}) for rank, here in layout.pieces.items()]
    assert merge_layouts(alone) == layout
    with pytest.raises(LayoutError, match="what rank 2 holds"):
        merge_layouts([layout, alone[2]])
    with pytest.raises(LayoutError, match=r"`w` has shape \(8, 3\).*\(8, 4\)"):
        merge_layouts([layout, TensorLayout({"w": (8, 4)}, {})])


def test_what_the_source_lacks_is_named():
    target = shards((8, 3), 2)
    with pytest.raises(LayoutError, match="no tensor `w`"):
        plan_transfer(TensorLayout({}, {}), target)
    with pytest.raises(LayoutError, match=r"`w` has shape \(8, 4\).*\(8, 3\)"):
        plan_transfer(shards((8, 4), 2), target)
    cut_off = TensorLayout(target.shapes, {0: {"w": make_local_pieces("w", ((0, 7), (0, 3)))}})
    with pytest.raises(LayoutError, match=r"\[\(7, 8\), \(0, 3\)\] of tensor `w`, which rank 1"):
        plan_transfer(cut_off, target)


def test_a_thousand_ranks_are_planned_in_little_memory():
    """Eight layers, cut in eight and sharded over 128 ranks each, to 128 replicas of eight."""
    ranks, tp = 1024, 8
    shapes = {f"{i}.{name}": (4096, 512) for i in range(8) for name in ("up", "gate", "q")}
    column = tuple(
        make_local_pieces(
            "", shard_box((4096, 512), [(0, rank % tp, tp), (0, rank // tp, ranks // tp)])
        )
        for rank in range(ranks)
    )
    table = PieceTable(tuple(range(ranks)), (column,), {name: (name, 0) for name in shapes})
    generated = [
        {
            name: make_local_pieces(name, shard_box(shape, [(0, i, tp)]))
            for name, shape in shapes.items()
        }
        for i in range(tp)
    ]
    target = TensorLayout(shapes, {rank: generated[rank % tp] for rank in range(ranks)})
    tracemalloc.start()
    found = plan_transfer(TensorLayout(shapes, table), target, 9)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20e6
    assert count_received(found)[9] == 24 * 4096 * 512 // tp * 127 // 128
    assert count_sent(found)[9] == count_received(found)[9]
    assert len(found.moves) == 24 * 128  # what many need is one move


class CountedOperations(TorchDispatchMode):
    """Counts the operations that Python asks of torch, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_many_small_boxes_are_copied_in_one_call():
    """As a rank receives a model of 36 layers that 16 ranks train: 6,384 boxes, of which each was
    one copy that Python asked for."""
    ranks, names = 16, [f"tensor.{number}" for number in range(399)]
    shapes = dict.fromkeys(names, (ranks, 2))
    held = {
        rank: {name: (Piece(((rank, rank + 1), (0, 2)), name, (0, 0)),) for name in names}
        for rank in range(ranks)
    }
    whole = {name: make_local_pieces(name, ((0, ranks), (0, 2))) for name in names}
    plan = plan_transfer(TensorLayout(shapes, held), TensorLayout(shapes, {ranks: whole}), ranks)
    assert len(plan.moves) == 6_384
    values = {n: torch.arange(2.0 * ranks).view(ranks, 2) + at for at, n in enumerate(names)}
    packed = torch.cat([cut(values[move.name], move.box).flatten() for move in plan.moves])
    taken = {name: torch.empty(ranks, 2, dtype=torch.bfloat16) for name in names}
    with CountedOperations() as counted:
        unpack_moves(plan.moves, make_tensor_sink(taken), packed)
    assert counted.found["_foreach_copy_"] == 1 and counted.found["copy_"] == 0
    assert all(taken[name].equal(values[name].bfloat16()) for name in names)
    mine = [move for move in plan.moves if move.sender == 5]
    buffer = torch.empty(2 * len(mine), dtype=torch.bfloat16)
    with CountedOperations() as counted:
        pack_moves(mine, {name: values[name][5:6] for name in names}.__getitem__, buffer)
    assert counted.found["_foreach_copy_"] == 1 and counted.found["copy_"] == 0
    assert buffer.equal(torch.cat([values[move.name][5] for move in mine]).bfloat16())


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_no_more_is_cast_at_a_time_than_there_is_room_for(most):
    shapes = {"a": (4, 3), "b": (7,)}
    here = {name: make_local_pieces(name, boxes.full_box(shape)) for name, shape in shapes.items()}
    plan = plan_transfer(TensorLayout(shapes, {0: here}), TensorLayout(shapes, {0: here}))
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    taken = {name: torch.empty(shape) for name, shape in shapes.items()}
    sizes = []

    def write(table, parts):
        sizes.append(parts.numel())
        make_tensor_sink(taken)(table, parts)

    assert copy_moves(plan.copies, values.__getitem__, write, torch.bfloat16, most) == 19
    assert max(sizes) <= most and sum(sizes) == 19
    assert all(taken[name].equal(values[name].bfloat16().float()) for name in shapes)

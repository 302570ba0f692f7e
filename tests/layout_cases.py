"""Random layouts, tensors that hold what a layout says, and files of such tensors."""

import math

import torch
from hypothesis import strategies as st

from hybridrl.checkpoint.tensors.file_plan import plan_files
from hybridrl.checkpoint.tensors.rank_manifest import RankManifest, manifest_path
from hybridrl.checkpoint.tensors.tensor_writer import (
    make_header_entries,
    slice_part,
    write_remote_file,
)
from hybridrl.layout.boxes import Piece, box_numel, box_shape, full_box, subtract_boxes
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.system.locations import write_atomically

NOTHING = -1.0

shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def boxes_in(draw, shape):
    """A part of a tensor that is not empty."""
    box = []
    for length in shape:
        start = draw(st.integers(0, length - 1))
        box.append((start, draw(st.integers(start + 1, length))))
    return tuple(box)


@st.composite
def partitions(draw, shape):
    """Disjoint boxes that make up the tensor."""
    parts = [full_box(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = draw(boxes_in(shape))
        hole = parts.pop(draw(st.integers(0, len(parts) - 1)))
        left = subtract_boxes(hole, [box])
        parts += left + subtract_boxes(hole, left)
    return parts


@st.composite
def layout_pairs(draw, disjoint_ranks=False):
    """(source, target): all elements are somewhere in the source, many in several places; targets
    are any boxes. Local tensors are larger than their pieces, which begin anywhere in them."""
    ranks = draw(st.integers(1, 5))
    tensors = {f"t{i}": draw(shapes) for i in range(draw(st.integers(1, 3)))}
    source = {rank: {} for rank in range(ranks)}
    target = {rank: {} for rank in range(draw(st.integers(1, 5)))}

    def add(pieces, name, box):
        here = pieces.setdefault(name, [])
        start = tuple(draw(st.integers(0, 2)) for _ in box)
        here.append(Piece(box, f"{name}#{len(here)}", start))

    anyone = st.integers(0, ranks - 1)
    for name, shape in tensors.items():
        for part in draw(partitions(shape)):
            for rank in draw(st.sets(anyone, min_size=1)):
                add(source[rank], name, part)
        for _ in range(draw(st.integers(0, 2))):
            add(source[draw(anyone)], name, draw(boxes_in(shape)))
        for pieces in target.values():
            for _ in range(draw(st.integers(0, 2))):
                add(pieces, name, draw(boxes_in(shape)))

    def layout(pieces):
        return TensorLayout(
            tensors, {r: {n: tuple(p) for n, p in here.items()} for r, here in pieces.items()}
        )

    shift = ranks if disjoint_ranks else 0
    return layout(source), layout(target).shifted(shift)


def numbered(layout):
    """The global tensors: every element another number."""
    found, first = {}, 0
    for name, shape in layout.shapes.items():
        size = math.prod(shape)
        found[name] = torch.arange(first, first + size, dtype=torch.float32).reshape(shape)
        first += size
    return found


def empty_tensors(layout, rank):
    """The local tensors of a rank, with nothing in them."""
    sizes = {}
    for pieces in layout.pieces.get(rank, {}).values():
        for piece in pieces:
            ends = [at + n for at, n in zip(piece.start, box_shape(piece.box), strict=True)]
            known = sizes.get(piece.tensor, ends)
            sizes[piece.tensor] = [max(pair) for pair in zip(known, ends, strict=True)]
    return {name: torch.full(size, NOTHING) for name, size in sizes.items()}


def local(tensor, piece):
    """The part of a local tensor that a piece is."""
    inner = zip(piece.start, box_shape(piece.box), strict=True)
    return tensor[tuple(slice(at, at + n) for at, n in inner)]


def cut(tensor, box):
    """A box of a global tensor."""
    return tensor[tuple(slice(*span) for span in box)]


def full_tensors(layout, rank, values):
    """The local tensors of a rank, holding their parts of the global tensors."""
    found = empty_tensors(layout, rank)
    for name, pieces in layout.pieces.get(rank, {}).items():
        for piece in pieces:
            local(found[piece.tensor], piece).copy_(cut(values[name], piece.box))
    return found


def elements(layout, rank):
    """The numbers of all elements on a rank."""
    values = numbered(layout)
    return {
        int(number)
        for name, pieces in layout.pieces.get(rank, {}).items()
        for piece in pieces
        if box_numel(piece.box)
        for number in cut(values[name], piece.box).flatten()
    }


def write_rank_file(folder, layout, values, rank):
    """Write a rank's file at a URL, and its list."""
    plan = plan_files(layout, rank, torch.float32, 1 << 20, "model")
    held = full_tensors(layout, rank, values)
    parts = [slice_part(part, held[part.source.tensor]) for part in plan.parts]
    own, boxes = write_remote_file(folder, rank, plan.parts, parts)
    headers = make_header_entries(plan) if rank == 0 else {}
    manifest = RankManifest(boxes, headers, {}, own)
    write_atomically(manifest_path(folder, rank), manifest.to_json().encode())


def assert_pieces_are_read(tensors, layout, values):
    for held in layout.pieces.values():
        for name, pieces in held.items():
            for piece in pieces:
                into = torch.empty(box_shape(piece.box))
                tensors.read(name, piece.box, into)
                assert torch.equal(into, cut(values[name], piece.box))

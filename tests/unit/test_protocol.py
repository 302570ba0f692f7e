"""Transfer protocols over meshes: which part each rank gets, and that one rank answers for it."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.batch import Batch
from hybridrl.controller import (
    DP,
    ONE_TO_ALL,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    UPDATE,
    InlineExecutor,
    TransferProtocol,
    transfer,
)
from hybridrl.errors import ConfigError
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh

SPLITTING = {
    "DP": DP,
    "THREE_D": THREE_D,
    "THREE_D_ALL_MICRO_DP": THREE_D_ALL_MICRO_DP,
    "UPDATE": UPDATE,
}


def places(*meshes):
    """Coordinates of every rank on all of these meshes together."""
    return [
        {axis: place for mesh in meshes for axis, place in mesh.coordinates(rank).items()}
        for rank in range(meshes[0].size)
    ]


def spread(protocol, coordinates):
    """By rank: the part, and whether it answers; as a worker group works it out."""
    return [
        (protocol.part(place), protocol.speaks(rank, coordinates))
        for rank, place in enumerate(coordinates)
    ]


def test_coordinates_count_with_the_last_axis_fastest():
    mesh = RankMesh({"dp": 2, "pp": 3, "tp": 2})
    assert mesh.size == 12
    found = [tuple(place.index for place in mesh.coordinates(r).values()) for r in range(12)]
    assert found == list(itertools.product(range(2), range(3), range(2)))
    assert list(mesh.coordinates(7)) == ["dp", "pp", "tp"]
    assert mesh.coordinates(7)["pp"] == MeshCoordinate(0, 3)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_off_the_mesh_is_refused(rank):
    with pytest.raises(ConfigError, match=rf"Rank {rank} is not on a mesh of 4 ranks"):
        RankMesh({"dp": 2, "tp": 2}).coordinates(rank)


def test_dp():
    two = places(RankMesh({"dp": 2}))
    assert spread(DP, two) == [((0, 2), True), ((1, 2), True)]
    four = places(RankMesh({"dp": 2, "tp": 2}))
    assert spread(DP, four) == [
        ((0, 2), True),
        ((0, 2), False),
        ((1, 2), True),
        ((1, 2), False),
    ]


def test_the_last_pipeline_stage_answers():
    stages = places(RankMesh({"pp": 2}))
    for protocol in (THREE_D, UPDATE):
        assert spread(protocol, stages) == [((0, 1), False), ((0, 1), True)]
    both = places(RankMesh({"dp": 2, "pp": 2, "tp": 2}))
    speakers = [rank for rank, (_, speaks) in enumerate(spread(THREE_D, both)) if speaks]
    assert speakers == [2, 6]


def test_rows_over_pipeline_stages():
    found = spread(TransferProtocol(split=("pp",)), places(RankMesh({"dp": 2, "pp": 2})))
    assert found == [((0, 2), True), ((1, 2), True), ((0, 2), False), ((1, 2), False)]


def test_the_hybrid_engine_has_two_meshes_on_the_same_ranks():
    ranks = places(RankMesh({"dp": 4}), RankMesh({"rollout_dp": 2, "rollout_tp": 2}))
    assert [part for part, _ in spread(DP, ranks)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert all(speaks for _, speaks in spread(DP, ranks))
    assert spread(THREE_D_ALL_MICRO_DP, ranks) == [
        ((0, 2), True),
        ((0, 2), False),
        ((1, 2), True),
        ((1, 2), False),
    ]


def test_two_axes_split_outermost_first():
    protocol = TransferProtocol(split=("dp", "pp"))
    ranks = places(RankMesh({"pp": 2, "dp": 3}))
    assert [part for part, _ in spread(protocol, ranks)] == [
        (0, 6),
        (2, 6),
        (4, 6),
        (1, 6),
        (3, 6),
        (5, 6),
    ]


def test_without_a_split_every_rank_gets_all_and_answers():
    assert spread(ONE_TO_ALL, places(RankMesh({"dp": 2, "tp": 2}))) == [((0, 1), True)] * 4


def test_an_axis_that_a_worker_does_not_have_does_not_split():
    assert spread(THREE_D_ALL_MICRO_DP, places(RankMesh({"dp": 2}))) == [
        ((0, 1), True),
        ((0, 1), False),
    ]


@given(
    st.permutations(["dp", "pp", "tp"]),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(sorted(SPLITTING)),
)
def test_every_part_has_one_speaker(axes, sizes, rollout_tp, name):
    protocol = SPLITTING[name]
    mesh = RankMesh(dict(zip(axes, sizes, strict=True)))
    rollout_tp = rollout_tp if mesh.size % rollout_tp == 0 else 1
    rollout = RankMesh({"rollout_dp": mesh.size // rollout_tp, "rollout_tp": rollout_tp})
    ranks = places(mesh, rollout)
    found = spread(protocol, ranks)
    parts = found[0][0][1]
    assert all(count == parts and 0 <= index < parts for (index, count), _ in found)
    answers = Counter(index for (index, _), speaks in found if speaks)
    assert answers == dict.fromkeys(range(parts), 1)
    # Ranks that agree on the axes that split hold the same rows, others do not.
    for (one, (mine, _)), (other, (theirs, _)) in itertools.combinations(
        zip(ranks, found, strict=True), 2
    ):
        assert (mine == theirs) == all(one[axis] == other[axis] for axis in protocol.split)
    # The speaker stands where the protocol says, also where a mesh has other axes.
    for place, (_, speaks) in zip(ranks, found, strict=True):
        if speaks:
            for axis, index in protocol.speakers.items():
                assert place[axis].index == index % place[axis].size


def test_transfer_wants_to_know_what_a_method_returns():
    with pytest.raises(ConfigError, match=r"`.*method` is marked with @transfer but does not say"):

        @transfer(DP)
        def method(self, batch): ...

    @transfer(DP)
    def annotated(self, batch) -> Batch: ...

    @transfer(DP)
    def quoted(self, batch) -> "Batch": ...

    @transfer(DP)
    def dotted(self, batch) -> "hybridrl.batch.batch.Batch": ...  # noqa: F821

    alias_of_batch = Batch

    @transfer(DP)
    def alias(self, batch) -> alias_of_batch: ...

    @transfer(UPDATE)
    def other(self, batch) -> None: ...

    @transfer(UPDATE)
    def unknown(self, batch) -> "NotImported": ...  # noqa: F821

    for annotation in (Batch | None, "Batch | None", "hybridrl.batch.batch.Batch | None"):
        with pytest.raises(ConfigError, match="A method returns a batch always or never"):

            def sometimes(self, batch): ...

            sometimes.__annotations__["return"] = annotation
            transfer(DP)(sometimes)

    for method in (annotated, quoted, dotted, alias):
        assert method.__transfer__.returns_batch
    assert not unknown.__transfer__.returns_batch
    assert not other.__transfer__.returns_batch
    assert other.__transfer__.protocol is UPDATE


def test_copies_of_a_row_stay_on_one_rank_where_a_method_asks_for_it():
    executor = InlineExecutor("cpu")
    prompts = executor.put(Batch.from_columns({"x": [0, 1, 2]}))
    repeated = prompts.repeat(4) | executor.put(Batch.from_columns({"y": list(range(12))}))
    assert (prompts.node.copies, repeated.node.copies, repeated.repeat(2).node.copies) == (1, 4, 8)
    assert repeated.take(range(12)).node.copies == 1

    @transfer(THREE_D_ALL_MICRO_DP, copies_together=lambda built: built["together"])
    def generate(self, batch: Batch) -> Batch: ...

    def rows(together, index):
        spread = generate.__transfer__.bind({"together": together})
        part = spread.part(index, 2, repeated.node.copies)
        return part.rows(repeated.node).tolist()

    assert [len(rows(True, index)) for index in (0, 1)] == [4, 8]
    assert [len(rows(False, index)) for index in (0, 1)] == [6, 6]

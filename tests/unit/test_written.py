"""What ranks say of files that they wrote together: every byte is theirs, and no other is there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import full_tensors, layout_pairs, numbered
from safetensors.torch import load_file

from hybridrl.checkpoint.tensors import file_plan
from hybridrl.checkpoint.tensors.file_plan import plan_files
from hybridrl.checkpoint.tensors.rank_manifest import (
    RankManifest,
    find_damage,
    find_missing_data,
    manifest_path,
    read_manifests,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.tensor_writer import (
    make_header_entries,
    make_written_box,
    slice_part,
    write_headers,
    write_parts,
)
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import box_shape, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout


def write(folder, layout, values, rank, file_bytes=1 << 20):
    """One rank's part, and its list."""
    plan = plan_files(layout, rank, torch.float32, file_bytes, "model")
    headers = {}
    if rank == 0:
        write_headers(folder, plan)
        headers = make_header_entries(plan)
    local = full_tensors(layout, rank, values)
    parts = [slice_part(part, local[part.source.tensor]) for part in plan.parts]
    sums = write_parts(folder.__truediv__, plan.parts, parts)
    boxes = [make_written_box(*found) for found in zip(plan.parts, sums, strict=True)]
    manifest_path(folder, rank).write_text(RankManifest(boxes, headers, {"x": 3.0}).to_json())


@given(layout_pairs(), st.sampled_from([40, 1 << 20]), st.randoms())
@settings(max_examples=15)
def test_ranks_write_in_any_order_and_account_for_every_byte(tmp_path_factory, pair, size, luck):
    layout, _ = pair
    folder, values = tmp_path_factory.mktemp("any"), numbered(layout)
    ranks = sorted(layout.pieces)
    luck.shuffle(ranks)
    for rank in ranks:
        write(folder, layout, values, rank, size)
    lists = read_manifests(folder)
    assert find_missing_data(folder, lists) == "" and find_damage(folder, lists) == ""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in values)


@pytest.fixture
def two_ranks(tmp_path):
    """Each has half of the columns of one tensor, and both have the other."""
    layout = TensorLayout(
        {"cut": (4, 6), "copied": (3,)},
        {
            rank: {
                "cut": make_local_pieces("cut", ((0, 4), (3 * rank, 3 * rank + 3))),
                "copied": make_local_pieces("copied", ((0, 3),)),
            }
            for rank in (0, 1)
        },
    )
    for rank in (1, 0):
        write(tmp_path, layout, numbered(layout), rank)
    return tmp_path


def test_any_byte_that_is_another_is_found(two_ranks):
    lists, file = read_manifests(two_ranks), two_ranks / "model.safetensors"
    content = file.read_bytes()
    assert [written.steps for written in lists] == [{"x": 3.0}] * 2
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert find_damage(two_ranks, lists).startswith(
            f"{file} is not what was written (the crc32 of"
        )
    file.write_bytes(content)
    assert find_damage(two_ranks, lists) == ""


def test_who_reads_a_written_box_whole_finds_that_it_is_another(two_ranks):
    lists, file = read_manifests(two_ranks), two_ranks / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1 - 4 * 3] ^= 4  # of the last column; three numbers of the other tensor follow
    file.write_bytes(content)
    files = TensorReader(two_ranks, "model", lists)
    for box in (((0, 4), (0, 3)), ((0, 4), (0, 4)), ((1, 4), (3, 6))):
        files.read("cut", box, torch.empty(box_shape(box)))
    for box in (((0, 4), (3, 6)), ((0, 4), (2, 6)), ((0, 4), (0, 6))):
        for into in (
            torch.empty(box_shape(box)),
            torch.empty(4, 9)[:, : box_shape(box)[1]],
            torch.empty(box_shape(box), dtype=torch.bfloat16),
        ):
            with pytest.raises(ConfigError, match=r"model.safetensors is damaged: `cut`"):
                files.read("cut", box, into)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_not_written_is_missed(two_ranks, rank):
    manifest_path(two_ranks, rank).unlink()
    assert find_missing_data(two_ranks, read_manifests(two_ranks))


def test_files_that_are_too_short_or_gone_are_named(two_ranks):
    lists, file = read_manifests(two_ranks), two_ranks / "model.safetensors"
    content = file.read_bytes()
    for harmed in (content[:-1], content + b"x"):
        file.write_bytes(harmed)
        assert find_missing_data(two_ranks, lists).startswith(f"{file} has {len(harmed)} of its")
    file.unlink()
    assert find_missing_data(two_ranks, lists).startswith(
        f"{file} has 0 of its {len(content)} bytes"
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"headers": {}, "steps": {}, "boxes": [{}]}', "{"])
def test_a_list_of_another_kind_is_a_sentence(tmp_path, text):
    manifest_path(tmp_path, 0).write_text(text)
    with pytest.raises(ValueError, match=r"rank-00000\.json: "):
        read_manifests(tmp_path)


def test_what_all_ranks_hold_is_dealt_evenly_in_pieces(monkeypatch):
    """Four ranks hold all of a large tensor and some small ones."""
    monkeypatch.setattr(file_plan, "_MAX_PIECE_ELEMENTS", 64)
    shapes = {"large": (100, 16), **{f"small{i}": (8, 8) for i in range(5)}}
    pieces = {n: make_local_pieces(n, tuple((0, side) for side in s)) for n, s in shapes.items()}
    layout = TensorLayout(shapes, dict.fromkeys(range(4), pieces))
    plans = [plan_files(layout, rank, torch.float32, 1 << 20, "model") for rank in range(4)]
    sizes = [sum(part.size for part in plan.parts) for plan in plans]
    assert sum(sizes) == 4 * (1600 + 5 * 64) and max(sizes) - min(sizes) <= 4 * 64

"""Tensors at a URL: each rank sends a file of its own, and any layout reads parts of them."""

import pickle
import uuid

import fsspec
import pytest
import torch
from hypothesis import given, settings
from layout_cases import assert_pieces_are_read, layout_pairs, numbered, write_rank_file
from safetensors.torch import load

from hybridrl.checkpoint.tensors.file_plan import plan_files
from hybridrl.checkpoint.tensors.rank_manifest import (
    find_damage,
    find_missing_data,
    manifest_path,
    read_manifests,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.tensor_writer import (
    write_remote_file,
)
from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.system.locations import (
    copy_files,
    list_file_sizes,
    parse_location,
    remove_location,
    write_atomically,
)


def new_folder():
    return parse_location(f"memory://{uuid.uuid4()}/step-000001/actor")


@settings(max_examples=40)
@given(layout_pairs())
def test_any_layout_reads_what_any_wrote_and_no_more_than_the_boxes_it_needs(pair):
    layout, other = pair
    folder, values = new_folder(), numbered(layout)
    assert find_missing_data(folder, read_manifests(folder))
    for rank in sorted(layout.pieces):
        write_rank_file(folder, layout, values, rank)
    lists = read_manifests(folder)
    if any(value.numel() for value in values.values()):
        assert find_missing_data(folder, lists) == "" and find_damage(folder, lists) == ""
    tensors = TensorReader(folder, "model", lists)
    assert_pieces_are_read(tensors, other, values)
    total = sum(value.numel() for value in values.values())
    read = tensors.bytes_read
    for name, value in values.items():
        tensors.read(name, full_box(value.shape), torch.empty(value.shape))
    assert tensors.bytes_read - read == 4 * total, "each byte once"


@pytest.fixture
def folder():
    """Each of two ranks has half of the columns."""
    layout = TensorLayout(
        {"cut": (4, 6)},
        {r: {"cut": make_local_pieces("cut", ((0, 4), (3 * r, 3 * r + 3)))} for r in (0, 1)},
    )
    found = new_folder()
    for rank in (0, 1):
        write_rank_file(found, layout, numbered(layout), rank)
    return found


def test_a_rank_s_file_is_one_of_safetensors(folder):
    tensors = load(folder._files.cat_file((folder / "rank-00001.safetensors")._path))
    ((name, half),) = tensors.items()
    assert name == "cut[[0, 4], [3, 6]]" and half.shape == (4, 3)


def test_a_byte_that_is_another_is_found_also_by_who_reads_it(folder):
    file = folder / "rank-00001.safetensors"
    content = bytearray(file.read_range(0, 10_000))
    content[-1] ^= 1
    write_atomically(file, bytes(content))
    assert "the crc32 of `cut` differs" in find_damage(folder, read_manifests(folder))
    with pytest.raises(ConfigError, match=r"rank-00001\.safetensors is damaged: `cut`"):
        tensors = TensorReader(folder, "model", read_manifests(folder))
        tensors.read("cut", full_box((4, 6)), torch.empty(4, 6))
    write_atomically(file, bytes(content[:-1]))
    assert "rank-00001.safetensors has" in find_missing_data(folder, read_manifests(folder))


def test_who_reads_what_no_list_has_is_told(folder):
    remove_location(manifest_path(folder, 1))
    tensors = TensorReader(folder, "model", read_manifests(folder))
    tensors.read("cut", ((0, 4), (0, 3)), torch.empty(4, 3))
    with pytest.raises(ConfigError, match="lacks 8 values of `cut`: no rank says"):
        tensors.read("cut", ((0, 4), (1, 5)), torch.empty(4, 4))


def test_a_copy_on_a_disk_is_read_as_at_the_url(folder, tmp_path):
    copy_files(folder, tmp_path)
    tensors, into = TensorReader(tmp_path, "model", read_manifests(tmp_path)), torch.empty(4, 6)
    tensors.read("cut", full_box((4, 6)), into)
    assert into.flatten().tolist() == list(range(24)) and tensors.shapes == {"cut": (4, 6)}


def test_a_file_that_could_not_be_sent_to_its_end_is_not_there(folder):
    def fails():
        yield torch.zeros(4, 3)
        raise OSError("no more")

    layout = TensorLayout({"a": (4, 3), "b": (4, 3)}, {0: {}})
    layout = TensorLayout(
        layout.shapes, {0: {n: make_local_pieces(n, ((0, 4), (0, 3))) for n in "ab"}}
    )
    plan = plan_files(layout, 0, torch.float32, 1 << 20, "model")
    other = folder.parent / "critic"
    with pytest.raises(Exception, match=r"Cannot write memory://.*no more\. See whether"):
        write_remote_file(other, 0, plan.parts, fails())
    assert list_file_sizes(other) == {}


def test_a_failure_of_the_file_system_is_an_os_error(folder, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the bucket is gone")

    file = pickle.loads(pickle.dumps(folder / "file"))
    for method in ("cat_file", "pipe_file", "open"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), method, fail)
    with pytest.raises(OSError, match="RuntimeError: the bucket is gone"):
        file.read_text()
    with pytest.raises(OSError, match="the bucket is gone"):
        write_atomically(file, b"content")
    with pytest.raises(OSError, match="the bucket is gone"), file.writing():
        pass

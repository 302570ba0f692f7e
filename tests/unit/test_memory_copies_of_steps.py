"""The copy of a step in memory: made whole by the driver, one at a time, and never in the way."""

import uuid

import pytest

from hybridrl.checkpoint.memory_copies import MemoryCopies
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.checkpoint.tensors.rank_manifest import RankManifest, WrittenHeader, manifest_path
from hybridrl.system.locations import list_file_sizes, parse_location, write_atomically

HEADER = WrittenHeader(4, 0, 4)


@pytest.fixture
def place():
    return parse_location(f"memory://{uuid.uuid4()}")


@pytest.fixture
def copies(place):
    return MemoryCopies(place)


@pytest.fixture
def saved(tmp_path, copies):
    """Saves a step: its files, and of the copy what ranks write."""
    files = CheckpointStore(tmp_path)

    def save(step, fault=""):
        folder, copy = files.begin(step) / "actor", copies.at(step) / "actor"
        headers = {"model.safetensors": HEADER}
        write_atomically(folder / "model.safetensors", b"1234")
        write_atomically(manifest_path(folder, 0), RankManifest([], headers).to_json().encode())
        write_atomically(folder / "generations.json", b"{}")
        write_atomically(files.at(step) / "driver.json", b"{}")
        files.complete(step)
        own = {"rank-00000.safetensors": HEADER}
        write_atomically(copy / "rank-00000.safetensors", b"1234")
        write_atomically(
            manifest_path(copy, 0), RankManifest([], headers, own=own).to_json().encode()
        )
        return copies.complete(step, fault, files, {})

    return save


def test_it_has_what_the_ranks_wrote_and_the_small_files_of_the_step(saved, copies):
    assert saved(2) == "" and copies.newest() == 2
    names = {"driver.json", "complete.json", "actor/generations.json", "actor/rank-00000.json"}
    assert list_file_sizes(copies.at(2)).keys() == names | {"actor/rank-00000.safetensors"}
    assert saved(4) == "" and copies.newest() == 4
    assert not copies.at(2).is_dir()


def test_a_copy_that_was_not_made_leaves_the_one_before_and_one_that_is_not_whole_none(
    saved, copies
):
    saved(2)
    assert saved(4, fault="a keeper is lost") == "a keeper is lost"
    assert not copies.at(4).is_dir() and copies.newest() == 2
    write_atomically(copies.at(6) / "driver.json", b"{}")  # by ranks of which some are lost
    assert copies.newest() == 2 and not copies.at(6).is_dir()
    (copies.at(2) / "actor" / "rank-00000.safetensors").remove()
    assert copies.newest() is None

"""Copies in the memory of keepers: whole on those that should, read from any that is there."""

import uuid
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from layout_cases import assert_pieces_are_read, layout_pairs, numbered, write_rank_file

from hybridrl.checkpoint.copies.memory_files import URL_SCHEME, KeeperFileSystem, MemoryKeeper
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.checkpoint.tensors.rank_manifest import (
    find_damage,
    find_missing_data,
    read_manifests,
)
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.system.locations import list_file_sizes, parse_location, write_atomically

NODES = 3


class Node(MemoryKeeper):
    lost = False


class Cluster(KeeperFileSystem):
    """Keepers of this process, by job."""

    nodes: ClassVar[dict[str, list[Node]]] = {}
    here = 0

    def keepers(self, job):
        ring = self.nodes[job]
        return ring[self.here :] + ring[: self.here]

    def ask(self, keepers, method, *arguments):
        lost = OSError("lost")
        return [lost if k.lost else getattr(k, method)(*arguments) for k in keepers]


@pytest.fixture(autouse=True)
def registered():
    fsspec.register_implementation(URL_SCHEME, Cluster, clobber=True)
    Cluster.here = 0


def new_folder(holders=2):
    job = f"{holders}-{uuid.uuid4().hex}"
    Cluster.nodes[job] = [Node() for _ in range(NODES)]
    return parse_location(f"{URL_SCHEME}://{job}"), Cluster.nodes[job]


def write_from(node, file, content):
    Cluster.here = node
    write_atomically(file, content)
    Cluster.here = 0


def test_a_file_is_on_the_node_of_its_writer_and_on_the_next(tmp_path):
    folder, keepers = new_folder()
    for node in range(NODES):
        write_from(node, folder / "step-000001" / f"{node}", bytes([node]) * 10)
    held = [sorted(path[-1] for path in keeper._files) for keeper in keepers]
    assert held == [["0", "2"], ["0", "1"], ["1", "2"]]
    assert list_file_sizes(folder / "step-000001") == {"0": 10, "1": 10, "2": 10}
    assert (folder / "step-000001" / "1").read_range(8, 10) == b"\1\1"


@pytest.mark.parametrize("lost", range(NODES))
def test_one_lost_keeper_loses_nothing_and_two_are_noticed(lost):
    folder, keepers = new_folder()
    for node in range(NODES):
        write_from(node, folder / "step" / f"{node}", f"of {node}".encode())
    texts = ["of 0", "of 1", "of 2"]
    assert [(folder / "step" / f"{n}").read_text() for n in range(NODES)] == texts
    keepers[lost].lost = True
    assert [(folder / "step" / f"{n}").read_text() for n in range(NODES)] == texts
    keepers[(lost + 1) % NODES].lost = True
    assert len(list_file_sizes(folder / "step")) == 2
    with pytest.raises(FileNotFoundError):
        (folder / "step" / f"{lost}").read_text()
    with pytest.raises(OSError, match="lost"):
        write_from(lost, folder / "step" / "more", b"")


def test_what_is_not_sent_to_its_end_is_not_there_and_takes_no_memory():
    folder, keepers = new_folder()
    with pytest.raises(ValueError, match="enough"), (folder / "a" / "b").writing() as sending:
        sending.write(bytes(40 << 20))
        raise ValueError("enough")
    assert not (folder / "a").is_dir() and not any(keeper._unfinished for keeper in keepers)
    keepers[0].add("x", 0, np.zeros(5, np.uint8))
    keepers[0].add("x", 0, np.ones(3, np.uint8))  # begun anew, by who came after a loss
    with pytest.raises(ValueError, match="does not follow"):
        keepers[0].add("x", 5, np.zeros(1, np.uint8))
    keepers[0].commit("x")
    assert keepers[0].read("x", 0, None).tolist() == [1, 1, 1]


def test_steps_in_memory_are_steps():
    folder, keepers = new_folder()
    folders = CheckpointStore(folder)
    for step in (2, 10):
        write_atomically(folders.at(step) / "driver.json", b"{}")
        folders.complete(step)
    write_atomically(folders.at(12) / "driver.json", b"")
    assert (folders.steps(), folders.unfinished(), folders.newest()[0]) == ([2, 10], [12], 10)
    folders.discard(10)
    folders.forget_after(2)
    assert list_file_sizes(folder) == {
        f"step-000002/{name}": size for name, size in list_file_sizes(folders.at(2)).items()
    }
    folders.discard(2)
    assert not any(keeper._files for keeper in keepers) and folders.steps() == []


@settings(max_examples=20)
@given(layout_pairs())
def test_any_layout_reads_what_any_wrote_when_a_node_is_lost(pair):
    layout, other = pair
    values, (folder, keepers) = numbered(layout), new_folder()
    folder = folder / "actor"
    for rank in sorted(layout.pieces):
        Cluster.here = rank % NODES
        write_rank_file(folder, layout, values, rank)
    keepers[0].lost = True
    lists = read_manifests(folder)
    if any(value.numel() for value in values.values()):
        assert find_missing_data(folder, lists) == "" and find_damage(folder, lists) == ""
    tensors = TensorReader(folder, "model", lists)
    assert_pieces_are_read(tensors, other, values)

"""Model folders by parts: what is read are slices, and what all ranks write is one model."""

import itertools
import json
import struct
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import boxes_in, cut, full_tensors, layout_pairs, numbered, shapes
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridrl.checkpoint.tensors import tensor_reader as reading
from hybridrl.checkpoint.tensors import tensor_writer as writing
from hybridrl.checkpoint.tensors import write_errors as agreement
from hybridrl.checkpoint.tensors.safetensors_header import SAFETENSORS_DTYPES
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader, index_file_name
from hybridrl.checkpoint.tensors.tensor_writer import write_tensors
from hybridrl.errors import ConfigError, StorageError
from hybridrl.layout.boxes import (
    box_numel,
    box_shape,
    contiguous_runs,
    full_box,
    make_local_pieces,
    split_box,
)
from hybridrl.layout.tensor_layout import TensorLayout


def whole_layout(tensors):
    """One rank holds everything."""
    pieces = {name: make_local_pieces(name, full_box(t.shape)) for name, t in tensors.items()}
    return TensorLayout({name: tuple(t.shape) for name, t in tensors.items()}, {0: pieces})


def write_all(folder, layout, values, **options):
    """As all ranks of the layout would together: the last phase waits for all of them."""
    ranks = sorted(layout.pieces)
    barrier = threading.Barrier(len(ranks))
    failures = []

    def program(rank):
        try:
            read = full_tensors(layout, rank, values).__getitem__
            write_tensors(folder, layout, rank, read, torch.float32, barrier, **options)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=program, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture(scope="module")
def threads_as_ranks():
    """The groups of `write_all` are barriers."""
    patch = pytest.MonkeyPatch()

    def gather(found, mine, group):
        found[:] = [mine] * len(found)
        group.wait()

    patch.setattr(agreement.dist, "all_gather_object", gather)
    patch.setattr(agreement.dist, "get_world_size", lambda group: group.parties)
    yield
    patch.undo()


@given(st.data(), shapes)
def test_runs_and_windows_are_the_elements_of_a_box_in_order(data, shape):
    numbers = torch.arange(box_numel(full_box(shape))).reshape(shape)
    box = data.draw(boxes_in(shape))
    wanted = cut(numbers, box).flatten().tolist()
    found = list(contiguous_runs(shape, box))
    assert [at + i for at, count in found for i in range(count)] == wanted
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found)), "fewest runs"
    most = data.draw(st.integers(1, 20))
    parts = list(split_box(box, most))
    assert all(0 < box_numel(part) <= most for part in parts)
    assert [n for part in parts for n in cut(numbers, part).flatten().tolist()] == wanted


def test_an_empty_box_has_no_runs_and_no_windows():
    assert not list(contiguous_runs((3, 4), ((1, 1), (0, 4)))) and not list(
        split_box(((1, 1), (0, 4)), 5)
    )


@given(st.data(), shapes, st.sampled_from(list(SAFETENSORS_DTYPES.values())))
def test_any_box_of_any_tensor_is_its_slice(tmp_path_factory, data, shape, dtype):
    folder = tmp_path_factory.mktemp("any")
    tensors = {name: torch.randn(shape).to(dtype) for name in ("b", "a")}
    save_file(tensors | {"other": torch.ones(3)}, folder / "model.safetensors")
    files = TensorReader(folder)
    box = data.draw(boxes_in(shape))
    for target in (dtype, torch.float32):
        into = torch.empty(box_shape(box), dtype=target)
        files.read("b", box, into)
        assert torch.equal(into, cut(tensors["b"], box).to(target))
    assert files.bytes_read == 2 * box_numel(box) * dtype.itemsize


@pytest.mark.parametrize("window", [8, 9, 64, 1 << 20])
def test_a_box_larger_than_a_window(tmp_path, monkeypatch, window):
    monkeypatch.setattr(reading, "_WINDOW_BYTES", window)
    tensor = torch.randn(7, 5, 3)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    target = torch.zeros(5, 3, 9)  # read into a part of something larger, with strides
    TensorReader(tmp_path).read("x", ((1, 6), (2, 5), (0, 3)), target[:, :, 4:7])
    assert torch.equal(target[:, :, 4:7], tensor[1:6, 2:5]) and target.count_nonzero() <= 45


@given(layout_pairs(), st.sampled_from([1, 40, 200, 1 << 20]))
def test_whatever_ranks_hold_they_write_the_model(tmp_path_factory, threads_as_ranks, pair, size):
    layout, _ = pair
    values = numbered(layout)
    folder = tmp_path_factory.mktemp("any")
    write_all(folder, layout, values, file_bytes=size)
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if len(tensors) > 1:
            assert sum(t.nbytes for t in tensors.values()) <= size
        found |= tensors
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert TensorReader(folder).shapes == dict(layout.shapes)
    assert not list(folder.glob(".*")), "what was written under other names is gone"


def test_copies_are_written_once_and_in_turn(tmp_path, monkeypatch, threads_as_ranks):
    """Four ranks hold all of eight tensors: each writes two of them."""
    values = {f"t{i}": torch.full((4, 4), float(i)) for i in range(8)}
    pieces = whole_layout(values).pieces[0]
    layout = TensorLayout(dict.fromkeys(values, (4, 4)), {rank: dict(pieces) for rank in range(4)})
    written, true = [], writing.os.pwrite
    monkeypatch.setattr(
        writing.os,
        "pwrite",
        lambda *args: written.append(threading.get_ident()) or true(*args),
    )
    write_all(tmp_path, layout, values)
    assert len(written) == 8 and len(set(written)) == 4
    assert {n: t.tolist() for n, t in load_file(tmp_path / "model.safetensors").items()} == {
        n: t.tolist() for n, t in values.items()
    }


def test_a_folder_holds_the_last_model_only(tmp_path):
    """Whether it was one file or several, nothing of the model before is left."""
    for size, count in [(40, 4), (1 << 20, 1), (70, 2), (40, 4), (1 << 20, 1)]:
        values = {f"t{i}": torch.randn(8) for i in range(4)}
        layout = whole_layout(values)
        write_tensors(tmp_path, layout, 0, values.__getitem__, torch.float32, None, file_bytes=size)
        assert len(list(tmp_path.glob("*.safetensors"))) == count
        assert (tmp_path / index_file_name("model")).exists() == (count > 1)
        files = TensorReader(tmp_path)
        for name, value in values.items():
            into = torch.empty(8)
            files.read(name, ((0, 8),), into)
            assert torch.equal(into, value)


def test_values_are_rounded_to_the_dtype_of_the_files(tmp_path):
    values = {"x": torch.randn(3, 5)}
    layout = whole_layout(values)
    write_tensors(tmp_path, layout, 0, values.__getitem__, torch.bfloat16, None)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], values["x"].bfloat16())


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "taken").write_text("a file")
    values = {"x": torch.ones(3)}
    with pytest.raises(StorageError, match=r"Cannot write .*taken.*Free some space"):
        write_tensors(
            tmp_path / "taken", whole_layout(values), 0, values.__getitem__, torch.float32, None
        )


def test_a_disk_that_fills_up_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    values = {"x": torch.ones(3)}
    arguments = (whole_layout(values), 0, values.__getitem__, torch.float32, None)
    write_tensors(tmp_path, *arguments)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "pwrite", full)
    with pytest.raises(StorageError, match=r"Cannot write .*model\.safetensors\.part: No space"):
        write_tensors(tmp_path, *arguments)
    assert load_file(tmp_path / "model.safetensors")["x"].tolist() == [1.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def file_of(header, values=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def entry(shape=(2,), start=0, stop=8, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


EIGHT = b"\0" * 8
TWICE = b'{"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "x": 1}'
DAMAGED = {
    "nothing in it": (b"", "0 bytes"),
    "a length and no more": (struct.pack("<Q", 100), "header should have 100 bytes, and it has 8"),
    "half a header": (file_of({"x": entry()})[:30], r"header should have \d+ bytes"),
    "no JSON": (file_of(b"{hello"), "header cannot be read"),
    "no table": (file_of([1, 2]), "no table of tensors"),
    "a name twice": (file_of(TWICE), "`x` stands there twice"),
    "no shape": (file_of({"x": {"dtype": "F32"}}, EIGHT), "says of `x`"),
    "a shape that is no numbers": (file_of({"x": entry(["2"])}, EIGHT), "says of `x`"),
    "a negative size": (file_of({"x": entry([-2])}, EIGHT), "says of `x`"),
    "an unknown dtype": (file_of({"x": entry(dtype="F4")}, EIGHT), "`x` as F4"),
    "another size than the shape's": (file_of({"x": entry([3])}, EIGHT), "`x` of shape"),
    "values missing": (file_of({"x": entry()}, EIGHT[:5]), r"should have \d+ bytes, and has"),
    "values too many": (file_of({"x": entry()}, EIGHT + EIGHT), r"should have \d+ bytes"),
    "a gap": (file_of({"x": entry(start=8, stop=16)}, EIGHT + EIGHT), "`x` begins at byte 8"),
    "an overlap": (
        file_of({"x": entry(), "y": entry(start=4, stop=12)}, EIGHT + EIGHT[:4]),
        "`y` begins at byte 4",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_sentences(tmp_path, damage):
    content, words = DAMAGED[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        TensorReader(tmp_path)
    assert str(path) in str(error.value) and str(error.value).endswith(".")


def write_two(folder, weights=None):
    """Two files and their index."""
    save_file({"x": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"y": torch.ones(2)}, folder / "model-00002-of-00002.safetensors")
    usual = {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}
    (folder / index_file_name("model")).write_text(json.dumps({"weight_map": weights or usual}))


def test_folders_whose_files_do_not_fit_are_sentences(tmp_path):
    write_two(tmp_path)
    assert TensorReader(tmp_path).shapes == {"x": (2,), "y": (2,)}
    write_two(tmp_path, {"x": "model-00002-of-00002.safetensors"})
    with pytest.raises(ConfigError, match=r"says that `x` is in .*00002-of-00002.*is not"):
        TensorReader(tmp_path)
    write_two(tmp_path, {"z": "model-00003-of-00003.safetensors"})
    with pytest.raises(ConfigError, match=r"no model-00003-of-00003.*1 of 1 files are missing"):
        TensorReader(tmp_path)
    for weights in ({"x": "../secret.safetensors"}, {"x": 3}):
        write_two(tmp_path, weights)
        with pytest.raises(ConfigError, match="does not say which tensor is in which file"):
            TensorReader(tmp_path)
    write_two(tmp_path)
    save_file(
        {"x": torch.zeros(2), "y": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors"
    )
    with pytest.raises(ConfigError, match=r"`y` is both in .*00001.* and in .*00002"):
        TensorReader(tmp_path)
    (tmp_path / index_file_name("model")).unlink()
    with pytest.raises(ConfigError, match=r"no model.*index.json, which is written last"):
        TensorReader(tmp_path)


def test_a_file_that_becomes_shorter_is_a_sentence(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    files = TensorReader(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConfigError, match="ended inside `x`"):
        files.read("x", ((0, 100),), torch.empty(100))
    assert TensorReader(tmp_path / "nowhere").shapes == {}

"""Saving while training goes on: the state of its own moment, one at a time, or a sentence."""

import os
import threading
import uuid

import pytest
import torch
from engine_cases import LEARNING, make_engine, make_model, update
from engine_cases import make_batch as batch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.engine_state import state_saver
from hybridrl.checkpoint.engine_state.state_files import plan_state_files
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.checkpoint.tensors import tensor_writer as writing
from hybridrl.checkpoint.tensors.rank_manifest import find_damage, find_missing_data, read_manifests
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.errors import ConfigError, StorageError
from hybridrl.system.locations import parse_location


@pytest.fixture
def engine(mesh):
    engine = make_engine(mesh, optimizer=LEARNING)
    update(engine, batch())
    return engine


@pytest.fixture
def held(monkeypatch):
    """Nothing is written before this is set."""
    go, write = threading.Event(), os.pwrite

    def waits(*arguments):
        assert go.wait(300)
        return write(*arguments)

    monkeypatch.setattr(writing.os, "pwrite", waits)
    yield go
    go.set()


def state(engine):
    """Copies of weights and moments, by name."""
    found = state_saver.read_local_state(engine, plan_state_files(engine).weights)
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_holds(folder, mesh, wanted, counters):
    other = make_engine(mesh, optimizer=LEARNING)
    assert load_training_state(other, folder) == counters
    found = state(other)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_each_save_has_the_state_of_its_own_moment(engine, mesh, held, tmp_path):
    saver, wanted = EngineStateSaver(engine), {}
    for number in (1, 2):
        wanted[number] = state(engine)
        if number == 2:
            held.set()  # the second save waits for the first, whose memory it needs
        saver.start(tmp_path / f"{number}", {"number": number}, {"more.json": {"a": number}})
        if number == 1:
            assert saver.finish(wait=False) is None
        for _ in range(2):
            update(engine, batch())
    saved = saver.finish(wait=True)
    assert saved == saver.finish(wait=False)
    assert saved.bytes == sum(tensor.nbytes for tensor in wanted[2].values()) and saved.seconds > 0
    for number, moment in wanted.items():
        folder = tmp_path / f"{number}"
        lists = read_manifests(folder)
        assert not find_missing_data(folder, lists) and not find_damage(folder, lists)
        assert_holds(folder, mesh, moment, {"number": number})
        assert (folder / "more.json").read_text() == f'{{"a": {number}}}'


def test_a_state_with_other_names_than_the_folder_of_the_model_goes_on(engine, mesh, tmp_path):
    EngineStateSaver(engine).save(
        tmp_path / "state", {"a": 1}, {}
    )  # as versions did that knew no folder
    weights = {n.removeprefix("model."): p.clone() for n, p in engine.local_parameters().items()}
    weights["lm_head.weight"] = weights[
        "embed_tokens.weight"
    ].clone()  # tied, and there all the same
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    other = make_engine(mesh, optimizer=LEARNING)
    other.source = TensorReader(tmp_path / "model")
    assert "lm_head.weight" in {part.name for part in other.stored_form().parts}
    assert load_training_state(other, tmp_path / "state") == {"a": 1}
    wanted = engine.local_parameters()
    for name, tensor in other.local_parameters().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_save_at_once_is_the_same_and_makes_no_copy(engine, mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(state_saver, "StagingBuffer", None)
    EngineStateSaver(engine).save(tmp_path / "at once", {}, {})
    assert_holds(tmp_path / "at once", mesh, state(engine), {})


def test_who_writes_what_is_worked_out_once(engine, tmp_path, monkeypatch):
    calls, plan = [], state_saver.plan_files
    monkeypatch.setattr(state_saver, "plan_files", lambda *a: calls.append(a) or plan(*a))
    saver = EngineStateSaver(engine)
    for number in range(3):
        saver.start(tmp_path / f"{number}", {}, {})
    saver.save(tmp_path / "3", {}, {})
    assert len(calls) == 2  # of weights, and of moments


@pytest.mark.parametrize("size", [1 << 20, 3000])
def test_transformers_opens_the_folder(engine, tmp_path, size):
    def tokenizer(folder):
        (folder / "tokenizer.json").write_text("{}")

    EngineStateSaver(engine, tokenizer, size).save(tmp_path / "state", {}, {})
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "state", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], p) for name, p in engine.full_parameters())
    assert loaded.config.dtype == torch.float32
    assert (tmp_path / "state" / "tokenizer.json").exists()
    assert (len(list((tmp_path / "state").glob("moments*.safetensors"))) > 1) == (size == 3000)


def test_a_disk_that_fills_up_is_a_sentence_when_it_is_asked_for(engine, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "pwrite", full)
    saver = EngineStateSaver(engine)
    saver.start(tmp_path / "state", {}, {})
    with pytest.raises(StorageError, match=r"Cannot write .*state/model\.safetensors: No space"):
        saver.finish(wait=True)
    with pytest.raises(ConfigError, match="has no list of its first rank"):
        load_training_state(engine, tmp_path / "state")
    monkeypatch.undo()
    with pytest.raises(StorageError, match="No space"):  # said once more, and no more
        saver.start(tmp_path / "again", {}, {})
    saver.start(tmp_path / "again", {}, {})
    assert saver.finish(wait=True).bytes > 0


def test_a_folder_that_holds_a_state_is_refused(engine, tmp_path):
    saver = EngineStateSaver(engine)
    saver.save(tmp_path, {}, {})
    for save in (saver.save, saver.start):
        with pytest.raises(StorageError, match=r"holds a state already.*a folder of its own"):
            save(tmp_path, {}, {})


def test_a_worker_that_ends_writes_no_more(engine, tmp_path, held):
    saver = EngineStateSaver(engine)
    saver.start(tmp_path / "state", {}, {})
    threading.Timer(0.1, held.set).start()
    saver.close()
    assert find_missing_data(tmp_path / "state", read_manifests(tmp_path / "state"))
    with pytest.raises(StorageError, match="the worker ended before"):
        saver.finish(wait=True)


def test_the_model_is_as_it_was(engine):
    """A guard of these tests: the engine learns."""
    begun = dict(make_model().named_parameters())
    assert any(not torch.equal(begun[name], p) for name, p in engine.full_parameters())


def test_a_second_copy_is_the_same_state_and_may_fail(engine, mesh, tmp_path, monkeypatch):
    saver, wanted = EngineStateSaver(engine), state(engine)
    copy = parse_location(f"memory://{uuid.uuid4()}/actor")
    saver.start(tmp_path / "1", {"number": 1}, {}, copy)
    for _ in range(2):
        update(engine, batch())
    assert saver.finish(wait=True).copy_seconds > 0
    for folder in (tmp_path / "1", copy):
        assert_holds(folder, mesh, wanted, {"number": 1})

    def lost(*_, **__):
        raise OSError("a process that keeps copies is lost")

    wanted = state(engine)
    monkeypatch.setattr(MemoryFileSystem, "open", lost)
    saver.start(tmp_path / "2", {"number": 2}, {}, copy.parent / "other")
    saved = saver.finish(wait=True)
    assert saved.copy_fault == "a process that keeps copies is lost" and not saved.copy_seconds
    assert_holds(tmp_path / "2", mesh, wanted, {"number": 2})

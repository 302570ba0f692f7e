"""Folders of whole steps: complete or not there, and what is damaged is named."""

import re
import shutil

import pytest

from hybridrl.errors import ConfigError, StorageError
from hybridrl.observe.run_directory import RunDirectory
from hybridrl.observe.step_folders import StepFolders


@pytest.fixture
def folders(tmp_path):
    return StepFolders(tmp_path)


def write(folders, step):
    part = folders.begin(step)
    (part / "actor").mkdir()
    (part / "actor" / "weights").write_bytes(b"w" * step)
    (part / "driver.json").write_text("{}")
    return folders.complete(step)


def names(folders):
    return sorted(path.name for path in folders.path.iterdir())


def test_a_step_has_its_name_when_it_is_complete(folders):
    assert folders.steps() == [] and folders.newest() == (None, [])
    part = folders.begin(7)
    assert part.name == "step-000007.part" and folders.steps() == []
    folder = write(folders, 7)
    assert folder == folders.at(7) and names(folders) == ["step-000007"]
    assert folders.fault(7) == "" and folders.newest() == (7, [])
    write(folders, 7)  # again, over it
    assert names(folders) == ["step-000007"] and folders.fault(7) == ""
    write(folders, 1_234_567)
    assert folders.steps() == [7, 1_234_567]


def test_what_was_not_completed_is_begun_anew(folders):
    (folders.begin(7) / "left").write_text("x")
    assert list(folders.begin(7).iterdir()) == []
    folders.discard(7)
    assert names(folders) == []


def test_the_newest_stay(folders):
    for step in (2, 4, 6):
        write(folders, step)
    folders.prune(2)
    assert folders.steps() == [4, 6]
    folders.prune(0)
    assert folders.steps() == [6], "never the newest"


def test_later_steps_are_forgotten(folders):
    for step in (2, 4, 6):
        write(folders, step)
    folders.begin(8)
    folders.forget_after(4)
    assert names(folders) == ["step-000002", "step-000004"]


def flip(folder):
    path = folder / "actor" / "weights"
    path.write_bytes(b"x" + path.read_bytes()[1:])


def truncate(folder):
    (folder / "actor" / "weights").write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (flip, r"weights is not what was written \(its crc32 differs\)"),
        (truncate, "weights has 0 bytes instead of 6"),
        (lambda folder: (folder / "driver.json").unlink(), "driver.json is missing"),
        (lambda folder: (folder / "complete.json").unlink(), "complete.json could not be read"),
        (lambda folder: (folder / "complete.json").write_text("[]"), "could not be read"),
        (lambda folder: shutil.rmtree(folder / "actor"), "weights is missing"),
    ],
)
def test_a_damaged_step_is_named_and_the_one_before_it_taken(folders, harm, words):
    for step in (2, 4, 6):
        write(folders, step)
    harm(folders.at(6))
    step, (sentence,) = folders.newest()
    assert step == 4 and sentence.startswith("The checkpoint of step 6 is damaged: ")
    assert sentence.endswith("; the step before it is taken.")
    assert re.search(words, sentence)
    assert folders.newest(4) == (4, [])
    assert folders.newest(1) == (None, [])
    for earlier in (2, 4):
        truncate(folders.at(earlier))
    with pytest.raises(ConfigError, match=r"No checkpoint in .* can be resumed\. .*step 6.*step 2"):
        folders.newest()


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"Cannot write .*step-000003"):
        StepFolders(tmp_path).begin(3)


def test_figures_and_samples_of_later_steps_are_forgotten(tmp_path):
    run = RunDirectory.at(tmp_path / "run")
    lines = [b'{"step": 1, "a": 1}\n', b'{"step": 2}\n', b'{"step": 2, "accuracy": 1}\n']
    run.metrics_file.write_bytes(b"".join(lines) + b'{"step": 3}\n{"step": 4, "lo')
    for step in (2, 3):
        (run.samples / f"step-{step:06d}.parquet").touch()
    (run.path / "timelines").mkdir()
    (run.path / "timelines" / "step-000004.png").touch()
    with run.metrics_file.open("ab") as appending:
        run.forget_after(2)
        appending.write(b'{"step": 3, "anew": 1}\n')
    assert run.metrics_file.read_bytes() == b"".join(lines) + b'{"step": 3, "anew": 1}\n'
    assert [path.name for path in run.samples.iterdir()] == ["step-000002.parquet"]
    assert list((run.path / "timelines").iterdir()) == []
    run.forget_after(-1)
    assert run.metrics_file.read_bytes() == b""

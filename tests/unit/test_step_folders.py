"""Folders of whole steps, on a disk and at a URL: what is not complete does not count, what is
damaged is named, and which stay."""

import re
import uuid

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hybridrl.checkpoint.keep_rule import KeepRule, check_figure
from hybridrl.checkpoint.run_state import check_plain_data
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.errors import ConfigError, StorageError
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.system.locations import parse_location, remove_location, write_atomically


@pytest.fixture(params=["disk", "memory://"])
def folders(request, tmp_path):
    where = tmp_path if request.param == "disk" else f"memory://{uuid.uuid4()}/run"
    return CheckpointStore(parse_location(where))


def write(folders, step, **figures):
    folder = folders.begin(step)
    write_atomically(folder / "actor" / "weights", b"w" * step)
    write_atomically(folder / "driver.json", b"{}")
    return folders.complete(step, figures)


def names(folders):
    return sorted(path.name for path in folders.path.iterdir())


def test_a_step_counts_when_it_is_complete(folders):
    assert folders.steps() == [] and folders.newest() == (None, [])
    write_atomically(folders.begin(7) / "weights", b"some")
    assert folders.steps() == [] and folders.unfinished() == [7]
    folder = write(folders, 7, accuracy=0.5)
    assert folder == folders.at(7) and names(folders) == ["step-000007"]
    assert folders.fault(7) == "" and folders.newest() == (7, []) and folders.unfinished() == []
    assert not (folder / "weights").is_file(), "it was begun anew"
    write(folders, 7)  # again, over it
    assert names(folders) == ["step-000007"] and folders.fault(7) == ""
    write(folders, 1_234_567)
    assert folders.steps() == [7, 1_234_567]
    folders.discard(7)
    assert folders.steps() == [1_234_567]


def test_a_job_that_is_killed_while_it_removes_a_step_leaves_none_that_counts(folders, monkeypatch):
    write(folders, 2)
    removed = []

    def once(location):
        if removed:
            raise OSError("killed")
        removed.append(location.name)
        remove_location(location)

    monkeypatch.setattr("hybridrl.checkpoint.store.remove_location", once)
    folders.discard(2)
    assert removed == ["complete.json"] and folders.unfinished() == [2] and folders.steps() == []


def test_later_steps_and_those_that_were_never_complete_are_forgotten(folders):
    for step in (2, 4, 6):
        write(folders, step)
    for step in (3, 8):
        write_atomically(folders.begin(step) / "weights", b"some")
    folders.forget_after(4)
    assert names(folders) == ["step-000002", "step-000004"]


def test_the_rule_says_which_steps_stay(folders):
    for step, accuracy in {10: 0.1, 20: 0.7, 30: 0.3, 40: 0.4, 50: 0.5}.items():
        write(folders, step, accuracy=accuracy)
    assert CheckpointStore(folders.path).prune(KeepRule(1, every=40, best="accuracy")) == [10, 30]
    assert folders.steps() == [20, 40, 50]
    best = (folders.path / "best.json").read_text(encoding="utf-8")
    assert '"step": 20' in best and '"accuracy": 0.7' in best
    folders.prune(KeepRule(0))
    assert folders.steps() == [50], "never the newest"


def test_what_is_best():
    steps = {1: {"accuracy": 0.5}, 2: {}, 3: {"accuracy": 0.5}, 4: {"accuracy": float("nan")}}
    assert KeepRule(1, best="accuracy").best_of(steps) == 1, "of equals the earliest"
    assert KeepRule(1, best="-accuracy").best_of({**steps, 5: {"accuracy": 0.4}}) == 5
    assert KeepRule(1, best="reward").best_of(steps) is None
    assert KeepRule(2, every=2, best="accuracy").kept(steps) == {1, 2, 3, 4}
    assert KeepRule(1).kept({}) == set()


@pytest.mark.parametrize(
    ("best", "figures", "words"),
    [
        ("acuracy", {"accuracy": 1.0}, "gives `acuracy`; there are accuracy. Did you mean"),
        ("-loss", {"eval/loss": 1.0}, "gives `loss`; there are eval/loss"),
        ("accuracy", {}, "evaluates nothing"),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_a_sentence(best, figures, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_figure("checkpoint.best", best, figures)


DAMAGE = {
    "a byte is another": r"weights is not what was written \(its crc32 differs\)",
    "too short": "weights has 0 bytes instead of 6",
    "a file is gone": "driver.json is missing",
    "the list is no list": "complete.json could not be read",
    "a folder is gone": "weights is missing",
}


def harm(folder, how):
    weights = folder / "actor" / "weights"
    match how:
        case "a byte is another":
            write_atomically(weights, b"x" + b"w" * 5)
        case "too short":
            write_atomically(weights, b"")
        case "a file is gone":
            remove_location(folder / "driver.json")
        case "the list is no list":
            write_atomically(folder / "complete.json", b"[]")
        case "a folder is gone":
            remove_location(folder / "actor")


@pytest.mark.parametrize(("how", "words"), DAMAGE.items())
def test_a_damaged_step_is_named_and_the_one_before_it_taken(folders, how, words):
    for step in (2, 4, 6):
        write(folders, step)
    harm(folders.at(6), how)
    step, (sentence,) = folders.newest()
    assert step == 4 and sentence.startswith("The checkpoint of step 6 is damaged: ")
    assert sentence.endswith("; the step before it is taken.")
    assert re.search(words, sentence)
    assert folders.newest(4) == (4, [])
    assert folders.newest(1) == (None, [])
    for earlier in (2, 4):
        harm(folders.at(earlier), "too short")
    with pytest.raises(ConfigError, match=r"No checkpoint in .* can be resumed\. .*step 6.*step 2"):
        folders.newest()


def test_a_step_under_another_name_or_without_files_is_none(tmp_path):
    folders = CheckpointStore(tmp_path)
    write(folders, 4)
    write(folders, 6).rename(folders.at(12))
    assert "was written as step 6, and has been renamed" in CheckpointStore(tmp_path).fault(12)
    folder = folders.begin(8)
    write_atomically(folder / "complete.json", b'{"step": 8, "files": {}}')
    (tmp_path / "step-000099").write_text("a file")
    assert folders.fault(8).endswith("lists no files")
    step, said = CheckpointStore(tmp_path).newest()
    assert step == 4 and len(said) == 2
    folders.forget_after(4)
    assert folders.steps() == [4]


@pytest.mark.parametrize("endless", [True, False])
def test_a_state_that_no_file_can_hold_is_a_sentence(endless):
    state = [10**5000]
    if endless:
        state = []
        state.append(state)
    with pytest.raises(ConfigError, match=r"mine: its state.*that contains itself, or too"):
        check_plain_data("mine", state)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"Cannot write .*step-000003"):
        CheckpointStore(tmp_path / "checkpoints").begin(3)


def test_what_workers_wrote_where_the_driver_does_not_see_it_does_not_count(folders):
    write(folders, 2)
    write_atomically(folders.begin(4) / "driver.json", b"{}")
    with pytest.raises(StorageError, match=r"nothing of what the workers of `actor` wrote there"):
        folders.complete(4, parts=["actor"])
    assert folders.steps() == [2] and folders.complete(2, parts=["actor"])


def test_a_url_of_the_disk_is_a_path(tmp_path):
    for scheme in ("file", "local"):
        assert parse_location(f"{scheme}://{tmp_path}/run") == tmp_path / "run"


def test_a_store_that_goes_away_is_a_sentence_and_the_step_before_still_loads(monkeypatch):
    folders = CheckpointStore(parse_location(f"memory://{uuid.uuid4()}/run"))
    write(folders, 2)
    folder = folders.begin(4)
    write_atomically(folder / "weights", b"some")

    class GoneError(Exception):
        pass

    def gone(*_, **__):
        raise GoneError("connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(MemoryFileSystem, "pipe_file", gone)
        words = r"Cannot write memory://.*step-000004: GoneError: connection refused\. See whether"
        with pytest.raises(StorageError, match=words):
            folders.complete(4)
        broken.setattr(MemoryFileSystem, "rm", gone)
        folders.discard(4)
    assert folders.newest() == (2, []) and folders.unfinished() == [4]


def test_figures_and_samples_of_later_steps_are_forgotten(tmp_path):
    run = RunDirectory.at(tmp_path / "run")
    lines = [b'{"step": 1, "a": 1}\n', b'{"step": 2}\n', b'{"step": 2, "accuracy": 1}\n']
    run.metrics_file.write_bytes(b"".join(lines) + b'{"step": 3}\n{"step": 4, "lo')
    for step in (2, 3):
        (run.samples / f"step-{step:06d}.parquet").touch()
    with run.metrics_file.open("ab") as appending:
        run.forget_after(2)
        appending.write(b'{"step": 3, "anew": 1}\n')
    assert run.metrics_file.read_bytes() == b"".join(lines) + b'{"step": 3, "anew": 1}\n'
    assert [path.name for path in run.samples.iterdir()] == ["step-000002.parquet"]
    run.forget_after(-1)
    assert run.metrics_file.read_bytes() == b""

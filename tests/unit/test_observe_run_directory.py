"""The run's folder: made once, linked to, written whole, and honest about a disk that refuses."""

import errno
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from hybridrl.errors import ConfigError, HybridRLError, StorageError
from hybridrl.run_files import run_directory as module
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.system.storage import explain_write_errors, format_write_error


class FrozenClock:
    @staticmethod
    def now():
        return datetime(2026, 3, 1, 9, 30, 0)


def test_create_makes_a_dated_folder_with_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "datetime", FrozenClock)
    run = RunDirectory.create(tmp_path / "a" / "runs", "my run/β: 1")
    assert run.path.name == "2026-03-01_09-30-00-my-run-β-1"
    assert run.logs.is_dir() and run.samples.is_dir()
    assert run.metrics_file == run.path / "metrics.jsonl"
    assert [run.config_file.name, run.summary_file.name, run.model.name] == [
        "config.yaml",
        "summary.json",
        "model",
    ]


def test_two_runs_of_one_second_get_two_folders_and_latest_is_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "datetime", FrozenClock)
    first = RunDirectory.create(tmp_path, "x")
    first.point_latest()
    second = RunDirectory.create(tmp_path, "x")
    assert (tmp_path / "latest").resolve() == first.path  # the second may come to nothing
    second.point_latest()
    assert second.path.name == first.path.name + "-2"
    assert (tmp_path / "latest").resolve() == second.path
    assert not Path(tmp_path / "latest").readlink().is_absolute()  # the root may be moved
    assert {path.name for path in tmp_path.iterdir()} == {
        first.path.name,
        second.path.name,
        "latest",
    }


def test_a_broken_latest_is_replaced_and_a_real_folder_is_not(tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    run = RunDirectory.create(tmp_path, "x")
    run.point_latest()
    assert (tmp_path / "latest").resolve() == run.path
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match=r"link to the newest run.*`run\.root`"):
        RunDirectory.create(tmp_path, "x")


def test_a_disk_without_links_has_no_latest_and_still_runs(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = RunDirectory.create(tmp_path, "x")
    run.point_latest()
    assert run.logs.is_dir()
    assert not (tmp_path / "latest").exists()


def test_a_root_that_cannot_be_written_names_the_setting_and_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Cannot write .*file.*Set `run\.root` to a folder"):
        RunDirectory.create(tmp_path / "file" / "runs", "x")
    with pytest.raises(ConfigError, match=r"Set `run\.directory` to a folder"):
        RunDirectory.at(tmp_path / "file")


def test_at_keeps_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        run = RunDirectory.at(tmp_path)
        run.write_text("config.yaml", "a: 1")  # of a run that came to nothing
        run.metrics_file.touch()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert RunDirectory.at(tmp_path / "new" / "er").samples.is_dir()
    assert not (tmp_path / "latest").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "model/config.json"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run.directory=.* holds an earlier run .*model.path="):
        RunDirectory.at(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]


def test_config_and_summary_are_replaced_whole(tmp_path):
    run = RunDirectory.at(tmp_path)
    run.write_text("config.yaml", "a: 1\n")
    run.write_json("summary.json", {"reward_last": float("nan"), "path": Path("x"), "steps": 3})
    run.write_json("summary.json", {"reward_last": float("inf"), "path": Path("x"), "steps": 4})
    assert run.config_file.read_text() == "a: 1\n"
    assert json.loads(run.summary_file.read_text()) == {
        "reward_last": None,
        "path": "x",
        "steps": 4,
    }
    assert not list(tmp_path.glob(".*"))


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rubbish(tmp_path, monkeypatch):
    run = RunDirectory.at(tmp_path)
    run.write_json("summary.json", {"steps": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(StorageError, match=r"summary\.json.*full.*free there.*Free some space"):
        run.write_json("summary.json", {"steps": 2})
    assert json.loads(run.summary_file.read_text()) == {"steps": 1}
    assert not list(tmp_path.glob(".*"))


def test_samples_are_parquet_by_step(tmp_path):
    run = RunDirectory.at(tmp_path)
    path = run.write_samples(12, pyarrow.table({"prompt": ["1+1="], "reward": [1.0]}))
    assert path == run.samples / "step-000012.parquet"
    assert parquet.read_table(path).to_pylist() == [{"prompt": "1+1=", "reward": 1.0}]
    assert [file.name for file in run.samples.iterdir()] == [path.name]


def test_samples_on_a_full_disk(tmp_path, monkeypatch):
    run = RunDirectory.at(tmp_path)
    part = run.samples / f".step-000001.parquet.{module.os.getpid()}.part"
    part.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"step-000001\.parquet.*disk is full"):
        run.write_samples(1, pyarrow.table({"prompt": ["x" * 100_000]}))
    assert not list(run.samples.iterdir())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not write"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_each_refusal_is_a_sentence(tmp_path, code, words):
    path = tmp_path / "missing" / "file"
    with pytest.raises(StorageError) as caught, explain_write_errors(path):
        raise OSError(code, "Input/output error")
    message = str(caught.value)
    assert str(path) in message and words in message and "free there" in message
    assert "`run.root` or `run.directory`" in message
    assert isinstance(caught.value, HybridRLError)


def test_a_really_full_disk_does_not_speak_of_quotas(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridrl.system.storage.find_free_bytes", lambda path: 4096)
    sentence = format_write_error(tmp_path, OSError(errno.ENOSPC, ""))
    assert "the disk is full (4 KiB free there)" in sentence


def test_importing_the_run_directory_brings_nothing_heavy():
    code = (
        "import sys, hybridrl.run_files.run_directory, hybridrl.run_files.metric_writers,"
        "hybridrl.console.phase_colors, hybridrl.run_files.final_sentence\n"
        "heavy = {'torch', 'ray', 'matplotlib', 'pandas', 'tensorboard', 'rich', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_run_in_the_folder_of_another_is_refused(tmp_path):
    old = RunDirectory.at(tmp_path / "old")
    old.metrics_file.write_text("{}\n")
    RunDirectory.at(old.path / "sub").path.rename(tmp_path / "no run yet")
    old.write_text("config.yaml", "")
    words = rf"run\.directory=.* is in {old.path}, the folder of an earlier run\. .*fork={old.path}"
    for name in ("sub", "checkpoints/step-000003/x"):
        for resumes in (False, True):  # `resume=auto`, where there is nothing to go on from
            with pytest.raises(ConfigError, match=words):
                RunDirectory.at(old.path / name, resumes=resumes)
    with pytest.raises(ConfigError, match=rf"run\.root=.* is in {old.path}, the folder of an"):
        RunDirectory.create(old.path, "x")
    assert {path.name for path in old.path.iterdir()} == {
        *("config.yaml", "metrics.jsonl", "logs", "samples")
    }
    RunDirectory.at(old.path, resumes=True)


def test_a_folder_of_checkpoints_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/sub"):
        with pytest.raises(ConfigError, match=r"Set `checkpoint\.folder` to a folder"):
            module.make_checkpoint_folder(tmp_path / name)


def test_a_private_folder_lets_nobody_else_in(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.close_to_others()
    assert directory.path.stat().st_mode & 0o777 == 0o700

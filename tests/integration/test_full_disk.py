"""Whole jobs on a disk that is full: a real one, so for those only who may mount it."""

import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.console.console_choice import make_console
from hybridrl.errors import StorageError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.run import loop

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("process_group")]

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.every=0", "eval.prompts=8", "checkpoint.every=2", "trainer.steps=4"),
]


@pytest.fixture
def disk(tmp_path):
    """A folder that is a disk of its own, of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk of its own needs the right to mount one")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave(disk, free):
    """Fills a disk up to so many bytes."""
    with (disk / "ballast").open("ab") as ballast:
        ballast.write(bytes(shutil.disk_usage(disk).free - free))


def train(folder, *overrides):
    with make_console(1, "test") as view:
        config = load_config([*SMALL, f"run.directory={folder}", *overrides])
        with Job(config) as job:
            loop.RunLoop(job, view).run()


def test_a_model_that_does_not_fit_is_a_sentence_before_anything_starts(disk):
    leave(disk, 32 << 10)
    words = r"Cannot write .*initial_model: the disk is full \(.* free there\)\. Free some space"
    with pytest.raises(StorageError, match=words):
        train(disk / "run")
    (disk / "ballast").unlink()
    train(disk / "run", "trainer.steps=1")


@pytest.mark.parametrize(
    "free", [64 << 10, *(pytest.param(kib << 10, marks=pytest.mark.long) for kib in (0, 256))]
)
def test_a_step_that_does_not_fit_is_a_sentence_and_the_one_before_it_loads(
    disk, tmp_path, monkeypatch, free
):
    train(tmp_path / "whole")
    complete = CheckpointStore.complete

    def fills_up(self, *arguments):
        found = complete(self, *arguments)
        leave(disk, free)
        return found

    monkeypatch.setattr(CheckpointStore, "complete", fills_up)
    with pytest.raises(
        StorageError, match=r"Cannot write .*(No space left|the disk is full).*Free"
    ):
        train(disk / "run")
    monkeypatch.undo()
    (disk / "ballast").unlink()
    folders = CheckpointStore(disk / "run" / "checkpoints")
    assert folders.steps() == [2] and not folders.fault(2)
    train(disk / "run", "resume=auto")
    found, whole = (
        load_file(f / "model" / "model.safetensors") for f in (disk / "run", tmp_path / "whole")
    )
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    rows = [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").open()]
    assert [step for step in rows if step] == [1, 2, 3, 4, 4]

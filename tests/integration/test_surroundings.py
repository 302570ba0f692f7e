"""Machines that are tighter than most, and files that go while a job runs."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
from settings import SHORT
from victims import Victim

from hybridrl.run_files.run_status import read_run_status

pytestmark = [pytest.mark.ray, pytest.mark.long]
JOB = [*SHORT, "rollout=transformers", "devices=cpu", "num_devices=2"]


def shell(first):
    """Has a shell do something before it becomes the command."""
    return ["sh", "-c", f'{first} && exec "$@"', "sh"]


def in_own_mounts(first):
    return ["unshare", "-m", *shell(first)]


@pytest.mark.parametrize(
    ("under", "environment"),
    [
        ([], {"HOME": "/proc/nohome"}),
        (shell("unset HOME"), {}),
        (shell("umask 077"), {}),
        (shell("ulimit -n 256"), {}),
        (in_own_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm"), {}),
    ],
)
def test_it_works_there(tmp_path, under, environment):
    if under[:1] == ["unshare"] and os.geteuid():
        pytest.skip("a /dev/shm of its own needs the right to mount one")
    job = Victim(tmp_path / "job", *JOB, under=under, environment=environment)
    assert job.finish() == 0, job.output
    assert "Traceback" not in job.output and read_run_status(job.run) == ("finished", "")
    if "umask 077" in " ".join(under):
        modes = [path.stat().st_mode for path in job.run.rglob("*") if not path.is_symlink()]
        assert not any(mode & (stat.S_IRWXG | stat.S_IRWXO) for mode in modes)
    assert not job.left_after(30)


def test_a_reward_file_may_go_when_the_job_has_started(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def score(prompt, response, answer):\n    return float(response == answer)\n")
    job = Victim(tmp_path / "job", *JOB, f"reward.function={own}:score", "trainer.steps=12")
    assert job.wait_for_step(2), job.output
    own.unlink()
    assert job.finish() == 0, job.output


def test_a_run_folder_that_is_removed_is_a_sentence(tmp_path):
    job = Victim(tmp_path, *JOB, "trainer.steps=100000", "observe.samples_every=5")
    assert job.wait_for_step(2), job.output
    shutil.rmtree(job.run, ignore_errors=True)
    assert job.finish() == 1, job.output
    assert f"error: Cannot write {job.run}" in job.output
    assert "Traceback" not in job.output
    assert not job.left_after(30)

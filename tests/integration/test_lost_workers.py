"""What is lost while a job runs is replaced, and the job is the one that lost nothing."""

from __future__ import annotations

import json
import os
import signal

import netlab
import pytest
from chaos import Chaos, Plan, main
from safetensors.torch import load_file
from settings import SHORT
from test_resume import rows_of
from victims import Victim

pytestmark = [pytest.mark.ray, pytest.mark.slow]
JOB = [*SHORT, "rollout=transformers", "resume=auto", "observe.samples_every=1"]


def test_a_killed_worker_is_replaced_and_nothing_is_lost(command, run, tmp_path):
    settings = [*JOB, "trainer.steps=12", "checkpoint.every=3", "eval.every=4"]
    lossy = command(*settings)
    lossy.wait_for("step 3: checkpoint saved")  # what is under way is not gone back to
    lossy.workers()[1].kill()
    assert lossy.finish() == 0, lossy.output
    assert "died during" in lossy.output and "Going on after" in lossy.output
    whole = run(*settings, f"run.directory={tmp_path / 'whole'}")
    assert rows_of(lossy.directory) == rows_of(whole)
    mine, other = (load_file(at / "model" / "model.safetensors") for at in (lossy.directory, whole))
    assert all(mine[name].equal(tensor) for name, tensor in other.items())
    (row,) = map(json.loads, (lossy.directory / "recoveries.jsonl").open())
    assert 0 <= row["after_step"] - row["from_step"] <= 3
    summary = json.loads((lossy.directory / "summary.json").read_text())
    assert summary["recoveries"] == 1 and summary["seconds_lost"] >= row["seconds"]


@pytest.mark.more
def test_sigterm_saves_the_step_in_hand(command):
    told = command(*JOB, "trainer.steps=100000", "checkpoint.every=1000", "recover.grace_s=120")
    told.wait_for_step(3)
    told.process.send_signal(signal.SIGTERM)
    assert told.finish() == 75, told.output
    assert f"main resume={told.directory}\n" in told.output
    last = rows_of(told.directory)[-1]["step"]
    assert [path.name for path in (told.directory / "checkpoints").iterdir()] == [
        f"step-{last:06d}"
    ]
    summary = json.loads((told.directory / "summary.json").read_text())
    assert summary["interrupted"] and summary["steps"] == last >= 3
    assert "Traceback" not in told.output


@pytest.mark.more
def test_sigterm_while_the_job_starts_is_for_another_time_too(command):
    told = command(*JOB, "executor=inline", "trainer.steps=100000", "checkpoint.every=1000")
    told.wait_for("loading data")
    told.process.send_signal(signal.SIGTERM)
    assert told.finish() == 75, told.output
    assert "ended before the first step" in told.output and "Traceback" not in told.output
    assert not (told.directory / "lock.json").exists()


@pytest.mark.long
def test_sigterm_to_ray_as_well_ends_it_within_the_grace(command):
    told = command(*JOB, "trainer.steps=100000", "checkpoint.every=2", "recover.grace_s=20")
    told.wait_for_step(3)
    os.killpg(told.process.pid, signal.SIGTERM)
    code = told.finish()
    # The raylet ends, too; a driver that is talking to it then is ended by Ray.
    assert code == 75 or (code == 1 and "Ray has ended the driver" in told.output), told.output
    assert "Traceback" not in told.output


@pytest.mark.long
def test_the_job_goes_on_with_fewer_devices(tmp_path):
    few = ["recover.min_devices=1", "recover.wait_s=3", "num_devices=2", "checkpoint.every=2"]
    with netlab.ray_nodes(nodes=2, cpus=1) as nodes:
        cluster = f"ray.address={nodes[0].cluster}"
        job = Victim(
            *(tmp_path / "job", *JOB, *few, cluster, "trainer.steps=60"),
            environment=netlab.RAY_ENVIRONMENT,
        )
        assert job.wait_for_step(4)
        nodes[1].fail()
        assert job.finish() == 0, job.output
    assert "with 1 device;" in job.output
    assert [row["step"] for row in job.rows() if "reward/mean" in row] == list(range(1, 61))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["relay", "reward", "node"])
def test_other_parts_are_replaced(tmp_path, kind):
    plan = Plan(kind, every=1, step=2, in_save=False, pause=0.1, number=0, again_after=None)
    faults, _ = Chaos(tmp_path).round(0, plan)
    assert not faults


@pytest.mark.long
def test_chaos():
    assert main(["--rounds", "3", "--seed", "1"])["ok"] == 3

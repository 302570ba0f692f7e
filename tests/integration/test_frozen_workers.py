"""A job with a rank that does not go on is, in the end, the job that lost nothing."""

from __future__ import annotations

import json
import re

import pytest
from safetensors.torch import load_file
from settings import SHORT
from test_resume import rows_of

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
LIMIT = 12
JOB = [
    *(*SHORT, "rollout=transformers", "resume=auto", "trainer.steps=12", "checkpoint.every=3"),
    *(f"controller.timeout_s={LIMIT}", "controller.heartbeat_s=3", "recover.wait_s=30"),
]
ENDLESS = """
from pathlib import Path
from hybridrl.algorithms import group_relative

def endless(scores, groups):
    calls = Path(__file__).with_suffix(".calls")
    with calls.open("a") as file:
        file.write(".")
    while calls.stat().st_size > 6:  # from the fourth step on, however often it comes
        pass
    return group_relative(scores, groups)
"""


@pytest.mark.long
def test_a_job_goes_on_after_a_rank_froze(command, run, tmp_path):
    frozen = command(*JOB)
    frozen.wait_for("step 3: checkpoint saved")
    stopped = frozen.workers()[1]
    stopped.suspend()
    assert frozen.finish() == 0, frozen.output
    assert not stopped.is_running()
    named = re.search(rf"missing: \w+ rank \d \(process {stopped.pid} on .*", frozen.output)
    assert named and "The stacks of every host are in" in named[0], frozen.output
    assert "Going on after" in frozen.output and "Traceback" not in frozen.output
    (row,) = map(json.loads, (frozen.directory / "recoveries.jsonl").open())
    assert f"process {stopped.pid}" in row["lost"] and row["from_step"] in (3, 6, 9)
    assert "did not answer" in next(frozen.directory.glob("stacks-*.txt")).read_text()
    whole = run(*JOB, f"run.directory={tmp_path / 'whole'}")
    assert rows_of(frozen.directory) == rows_of(whole)
    mine, other = (load_file(f / "model" / "model.safetensors") for f in (frozen.directory, whole))
    assert all(mine[name].equal(tensor) for name, tensor in other.items())


@pytest.mark.long
def test_what_hangs_again_in_the_same_place_ends_the_job(command, tmp_path):
    (tmp_path / "own.py").write_text(ENDLESS)
    job = command(*JOB, f"algorithm.advantage={tmp_path}/own.py:endless")
    assert job.finish() == 1, job.output
    assert job.output.count("Going on after") == 1, job.output
    assert re.search(r"missing: .*own\.py:\d+ in endless", job.output)
    assert "hung the time before, too" in job.output and "Traceback" not in job.output

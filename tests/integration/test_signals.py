"""Ctrl-C, a closed terminal and a scheduler, at any moment: the job ends and leaves nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest
from settings import SHORT
from victims import Victim

from hybridrl.run_files.run_status import read_run_status

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
JOB = [*SHORT, "rollout=transformers", "devices=cpu", "num_devices=2", "recover.grace_s=120"]
ENDLESS = "trainer.steps=100000"


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("moment", "signals", "saved"),
    [
        ("step +3/", [signal.SIGHUP], True),
        ("step +3/", [signal.SIGINT, signal.SIGINT], None),
        long("step +3/", [signal.SIGHUP, signal.SIGHUP], None),
        long("starting Ray", [signal.SIGINT], False),
        long("starting workers", [signal.SIGINT], False),
        long("starting workers", [signal.SIGTERM], False),
        long("starting workers", [signal.SIGINT, signal.SIGINT], False),
        long("warm-up", [signal.SIGINT], None),
    ],
)
def test_a_signal_ends_the_job(tmp_path, moment, signals, saved):
    job = Victim(tmp_path, *JOB, ENDLESS)
    assert job.wait_for_line(moment)
    for number in signals:
        # A terminal's reach every process of the job.
        is_of_terminal = number == signal.SIGINT
        (os.killpg if is_of_terminal else os.kill)(job.process.pid, number)
        time.sleep(0.2)
    assert job.finish() == 130, job.output
    assert "Traceback" not in job.output
    name = "Ctrl-C" if signals[0] == signal.SIGINT else signals[0].name
    assert read_run_status(job.run) == ("interrupted", name)
    has_model = (job.run / "model" / "model.safetensors").exists()
    assert (job.run / "model").exists() == has_model and saved in (None, has_model), job.output
    if saved:
        assert "Interrupted after step " in job.output and "model.path=" in job.output
        assert '"interrupted"' in (job.run / "report.html").read_text()
    assert not job.left_after(30)


@pytest.mark.long
@pytest.mark.parametrize("words", ["saving ...", "closing ..."])
def test_ctrl_c_at_the_end_loses_nothing_that_was_done(tmp_path, words):
    job = Victim(tmp_path, *JOB)
    assert job.wait_for_line(words)
    os.killpg(job.process.pid, signal.SIGINT)
    code = job.finish()
    assert code == (130 if words.startswith("saving") else 0), job.output
    assert "Traceback" not in job.output
    assert (job.run / "model" / "model.safetensors").exists()
    assert not job.left_after(30)

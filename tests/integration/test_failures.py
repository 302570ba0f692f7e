"""Kill anything at any time: the message says what died, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from settings import SHORT

pytestmark = [pytest.mark.ray]
LONG = [*SHORT, "trainer.steps=100000", "rollout=transformers"]


@pytest.mark.more
def test_a_killed_worker_is_named_and_ends_the_job(command):
    run = command(*LONG)
    run.wait_for_step(2)
    run.workers()[1].kill()
    assert run.finish() == 1
    assert "died during" in run.output and "killed from outside" in run.output
    assert "Traceback" not in run.output


@pytest.mark.long
def test_a_killed_worker_with_vllm(command):
    run = command(*SHORT, "trainer.steps=100000")
    run.wait_for_step(2)
    run.workers()[0].send_signal(signal.SIGKILL)
    assert run.finish() == 1
    assert "died during" in run.output


@pytest.mark.more
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_an_interrupt_saves_what_there_is(command, number):
    run = command(*LONG)
    run.wait_for_step(3)
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does: every process of the job
    else:
        run.process.send_signal(number)
    assert run.finish() == 130, run.output
    assert (run.directory / "model" / "model.safetensors").exists()
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["interrupted"] and summary["steps"] >= 3
    assert "Traceback" not in run.output


@pytest.mark.long
def test_a_killed_driver_leaves_nothing_that_stops_the_next_job(command, tmp_path):
    two = ["rollout=vllm", "rollout.parallel.tp=2"]
    run = command(*LONG, *two)
    run.wait_for_step(1)
    run.process.kill()
    run.finish()
    again = command(*SHORT, *two, f"run.directory={tmp_path / 'again'}")
    assert again.finish() == 0, again.output


@pytest.mark.more
@pytest.mark.parametrize("choice", ["value", "fail", pytest.param("drop", marks=pytest.mark.long)])
def test_a_reward_that_hangs(command, tmp_path, choice):
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def score(prompt, response, answer):\n"
        "    if prompt[0] in '13579':\n"
        "        time.sleep(1000)\n"
        "    return float(response == answer)\n"
    )
    run = command(
        *SHORT,
        "rollout=transformers",
        "executor=inline",
        "trainer.steps=1",
        "eval.prompts=1",
        "rollout.samples_per_prompt=2",
        "reward.function=slow.py:score",
        "reward.timeout_s=0.2",
        f"reward.on_error={choice}",
    )
    code = run.finish()
    if choice == "fail":
        assert code == 1
        assert "reward.timeout_s" in run.output
    else:
        assert code == 0, run.output
        lines = (run.directory / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert any(row.get("reward/timeouts", 0) > 0 for row in rows)


@pytest.mark.long
def test_a_worker_that_hangs_is_named_with_all_stacks(command):
    run = command(*LONG, "controller.timeout_s=8", "controller.heartbeat_s=3")
    run.wait_for_step(2)
    stopped = run.workers()[1]
    stopped.suspend()
    assert run.finish() == 1, run.output
    assert not stopped.is_running()
    assert f"(process {stopped.pid} on 127.0.0.1) has not answered for 3 s" in run.output
    assert re.search(rf"missing: \w+ rank \d \(process {stopped.pid} on .* not answer", run.output)
    (stacks,) = run.directory.glob("stacks-*.txt")
    assert "did not answer" in stacks.read_text() and "--- host 0" in stacks.read_text()
    assert str(stacks) in run.output and "Traceback" not in run.output


@pytest.mark.long
def test_a_machine_that_runs_out_of_memory_is_named_with_who_uses_it(command):
    low = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "250"}
    run = command(*LONG, environment=low)
    assert run.finish() == 1, run.output
    assert "Ray's memory monitor ended it" in run.output and " limit)" in run.output
    assert re.search(r"The largest processes:(\n +[\d.]+ GiB  process \d+: .+){3}", run.output)
    assert "Traceback" not in run.output


@pytest.mark.long
def test_a_full_disk_is_a_sentence(command):
    run = command(*LONG)
    run.directory.mkdir(exist_ok=True)
    metrics = run.directory / "metrics.jsonl"
    if not metrics.exists():
        metrics.symlink_to("/dev/full")
    code = run.finish()
    assert code == 1, run.output
    assert "metrics.jsonl" in run.output and "Traceback" not in run.output


@pytest.mark.more
def test_a_failing_step_shows_no_secret(command, tmp_path):
    """Not in what a reward function prints, logs or raises, and in no file of the run."""
    (tmp_path / "score.py").write_text(
        "import sys, logging\n"
        "def score(prompt, response, api_key, header, calls=[]):\n"
        "    calls.append(prompt)\n"
        "    print('printed', api_key)\n"
        "    logging.getLogger('mine').error('logged %s', header)\n"
        "    if len(calls) > 1: raise OSError(f'https://me:{api_key}@host: {header}')\n"
        "    return 1.0\n"
    )
    running = command(
        f"reward.function={tmp_path / 'score.py'}:score",
        "reward.options.score.api_key=zq7Xv9-Kw3Text",
        "reward.options.score.header=Bearer ${oc.env:SERVICE_TOKEN}",
        "rollout=transformers",
        "trainer.steps=1",
        environment={"SERVICE_TOKEN": "tk-Xv9-Kw3"},
    )
    assert running.finish() == 1
    written = {"console": running.output}
    for file in filter(Path.is_file, (tmp_path / "run").rglob("*")):
        written[str(file)] = file.read_bytes().decode("utf-8", "replace")
    assert "OSError: https://me:***@host: ***" in running.output
    assert "printed ***" in "".join(written.values())
    for text in ("zq7Xv9-Kw3Text", "tk-Xv9-Kw3"):
        assert [name for name, said in written.items() if text in said] == []

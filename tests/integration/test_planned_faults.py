"""A fault in any call of any role: the sentence that names it, the exit code, and what is left."""

from __future__ import annotations

import json
import re

import pytest
from settings import SHORT
from victims import Victim

from hybridrl.run_files.run_status import read_run_status

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
LIMIT = 8
JOB = [
    *(*SHORT, "rollout=transformers", "devices=cpu", "num_devices=2", "trainer.steps=4"),
    *(f"controller.timeout_s={LIMIT}", "controller.heartbeat_s=3"),
]
DIED = r"{} rank {} \(process \d+ on [\d.]+\) died during {}\."
MISSING = (
    r"did not finish within 8 s .*missing: {} rank {} \(process \d+ on [\d.]+\), which does not"
)


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


def died(method, rank=1):
    return DIED.format(method.partition(".")[0], rank, re.escape(method))


def test_a_fault_that_no_call_would_meet_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_FAULT", "critic.update:1:kill")
    said = refusal(*SHORT, "rollout=transformers", "executor=inline")
    assert "no role `critic`; the job's workers are actor, reward" in said


@pytest.mark.parametrize(
    ("fault", "said", "settings"),
    [
        long("actor.update_actor@1:2:kill", died("actor.update_actor"), []),
        long("actor.update_actor@1:2:stop", MISSING.format("actor", 1), []),
        long(
            "reward.compute_reward@0:2:raise",
            r"reward\.compute_reward failed on rank 0: Runtime",
            [],
        ),
        ("actor.save_model@0:1:enospc", r"Cannot write \S*model.*No space left on device", []),
        long("actor.save_model@1:1:kill", died("actor.save_model"), []),
        long("actor.save_model@1:1:stop", MISSING.format("actor", 1), []),
        long("actor.__init__@1:1:kill", died("actor.__init__"), []),
        long("actor.__init__@1:1:stop", MISSING.format("actor", 1), []),
        long("actor.__init__@1:1:raise", r"actor\.__init__ failed on rank 1", []),
        long("actor.generate_sequences@0:2:kill", died("actor.generate_sequences", 0), []),
        long("actor.generate_sequences@1:3:stop", MISSING.format("actor", 1), []),
        long("actor.update_actor@1:1:raise", r"actor\.update_actor failed on rank 1", []),
        long("reward.compute_reward@0:1:kill", died("reward.compute_reward", 0), []),
        long("reward.compute_reward@1:2:stop", MISSING.format("reward", 1), []),
        long(
            "actor.start_saving@1:1:enospc",
            r"Cannot write \S*step-000002/\S*.*No space left on device",
            ["checkpoint.every=2", "recover.max_restarts=0"],
        ),
        long(
            "actor.finish_saving@0:1:kill",
            died("actor.finish_saving", 0),
            ["checkpoint.every=2", "recover.max_restarts=0"],
        ),
        long(
            "reference.compute_ref_log_prob@1:2:kill",
            died("reference.compute_ref_log_prob"),
            ["algorithm.kl_coefficient=0.1"],
        ),
        long("critic.update_critic@1:1:kill", died("critic.update_critic"), ["algorithm=ppo"]),
        long(
            "generator.receive_weights@0:2:kill",
            died("generator.receive_weights", 0),
            ["placement=separation"],
        ),
    ],
)
def test_a_fault_is_named_and_leaves_nothing(tmp_path, fault, said, settings):
    job = Victim(tmp_path, *JOB, *settings, environment={"HYBRIDRL_FAULT": fault})
    assert job.finish() == 1, job.output
    found = re.findall(f"^error: .*{said}.*$", job.output, re.MULTILINE)
    assert len(found) == 1, job.output
    state, why = read_run_status(job.run)
    assert state == "failed" and found[0].startswith(f"error: {why}")
    assert '"failed"' in (job.run / "report.html").read_text()
    assert not (job.run / "model").exists() and not list(job.run.glob(".model*"))
    for line in (job.run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert not job.left_after(30)


@pytest.mark.long
def test_a_slow_reward_is_not_a_hang(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(prompt, response):\n    time.sleep(0.6)\n    return 0.0\n"
    )
    own = [f"reward.function={tmp_path}/slow.py:slow", "eval.prompts=2", "trainer.steps=1"]
    own += ["controller.timeout_s=8", "reward.timeout_s=4"]  # a rank scores for twenty seconds
    job = Victim(tmp_path / "job", *JOB, *own)
    assert job.finish() == 0, job.output
    assert read_run_status(job.run) == ("finished", "")

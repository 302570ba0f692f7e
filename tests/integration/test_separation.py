"""Generation on devices of its own, with real Ray and vLLM."""

import json

import pyarrow.parquet as pq
import pytest
from settings import LEARNS, SHORT, TINY
from tiers import few_of

from hybridrl import load_config

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]
SEPARATED = [*SHORT, *LEARNS, "placement=separation", "rollout.verify_weights=true"]


def steps_of(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


@pytest.mark.parametrize("flow", few_of(["collective", "store", "in_flight"], ["collective"]))
def test_the_main_job_runs_and_samples_are_as_old_as_they_may_be(run, flow):
    options = {
        "collective": ["placement.staleness=1"],
        "store": ["placement.staleness=2"],
        "in_flight": ["placement.staleness=1", "placement.in_flight=true"],
    }[flow]
    directory = run(*SEPARATED, *options, "trainer.steps=6", "observe.samples_every=1")
    steps = steps_of(directory)
    assert len(steps) == 6
    most = 2 if flow == "store" else 1
    ages = [row["staleness/max"] for row in steps]
    # Warm-up is over before the first samples, so these are fresh; later ones have fallen behind.
    if flow == "in_flight":
        assert ages[0] == 0 and all(0 <= age <= most for age in ages)
    else:
        assert ages == [min(step, most) for step in range(6)]
    # What the trainer says of samples differs from what vLLM said just where they are stale.
    mismatch = [row["mismatch/k3"] for row in steps]
    assert mismatch[0] < 1e-6
    if flow != "in_flight":
        assert max(mismatch[1:]) > 1e-6
    versions = pq.read_table(directory / "samples" / "step-000006.parquet")["policy_version"]
    warm_up = 3
    assert min(versions.to_pylist()) >= warm_up + 5 - most


@pytest.mark.more
@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_share_the_rows(tp, hosts, tmp_path):
    """There are more prompts than run at a time: two replicas claim them one by one, and the two
    ranks of one replica claim the same."""
    settings = [
        f"run.directory={tmp_path / 'run'}",
        *(*TINY, "data.prompts_per_step=12", "eval.prompts=8", "placement=explicit"),
        *("num_devices=3", f"rollout.parallel.tp={tp}", "rollout.max_sequences=8"),
        *("placement.roles.generator.devices=[1,2]", "placement.roles.actor.devices=[0]"),
        *("placement.roles.reward.devices=[0]", "rollout.samples_per_prompt=4"),
        "ray.address=auto",  # where there may be more devices than this machine has cores
    ]
    with hosts.job(load_config(settings)) as job:
        batch = job.next_batch().repeat(4)
        samples = batch | job.groups["actor"].generate_sequences(batch, job.sampling)
        found = samples.collect(["group_id", "prompt_ids", "response_ids", "rollout_log_probs"])
        assert len(found) == 48 and found["group_id"].tolist() == [
            i for i in range(12) for _ in "abcd"
        ]
        said = job.groups["actor"].compute_log_prob(samples.select("prompt_ids", "response_ids"))
        log_probs = said.collect(["log_probs"])["log_probs"].values
        assert log_probs.numpy() == pytest.approx(
            found["rollout_log_probs"].values.numpy(), abs=1e-4
        )

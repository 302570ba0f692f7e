"""Steps that do not wait for their last samples, over Ray hosts and with real engines."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from settings import TINY

from hybridrl import load_config
from hybridrl.main import run

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SAMPLES, STEPS = 3, 5
JOB = [
    *(*TINY, "warmup.steps=0", "eval.prompts=8", "data.prompts_per_step=8", "devices=cpu"),
    *(f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_tokens=64", "rollout.partial=0.6"),
    *("model.tiny.context=128", "actor.optimizer.learning_rate=1e-30"),  # so weights stay
]
APART = ["placement=separation"]


def more(*case, name):
    return pytest.param(*case, marks=[pytest.mark.more, pytest.mark.vllm], id=name)


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        pytest.param(2, ["rollout=transformers"], id="transformers"),
        more(
            *(4, ["rollout=transformers", "rollout.partial=0.4", "rollout.partial_steps=1"]),
            name="4 ranks, at most once",
        ),
        more(2, [], name="vllm"),
        more(2, ["rollout.parallel.tp=2"], name="vllm, cut"),
        more(2, [*APART, "placement.staleness=1"], name="vllm apart, one step ahead"),
        more(3, [*APART, "rollout=transformers"], name="transformers apart"),
        more(
            2, [*APART, "placement.staleness=1", "placement.in_flight=true"], name="vllm, any time"
        ),
        more(1, ["algorithm=ppo"], name="ppo"),
    ],
)
def test_prompts_are_trained_whole_and_once_with_the_tokens_of_several_steps(
    hosts, tmp_path, devices, settings
):
    given = [f"run.directory={tmp_path / 'run'}", f"num_devices={devices}", "ray.address=auto"]
    dealt, carried, mixed, begun = Counter(), [], 0, set()
    with hosts.job(load_config([*JOB, *given, *settings])) as job:
        trainer = job.make_trainer()
        most = job.config.rollout.partial_steps
        for step in range(1, STEPS + 1):
            batch, handles = trainer.step()
            said = job.groups["actor"].compute_log_prob(batch.select("prompt_ids", "response_ids"))
            names = ["group_id", "rollout_log_probs", "token_versions", "policy_version"]
            found = batch.collect([*names, "carried", "finish_reason", "response_ids", "scores"])
            log_probs = said.collect(["log_probs"])["log_probs"].values
            expected = found["rollout_log_probs"].values
            assert torch.allclose(log_probs, expected, atol=2e-3), "of the prefix that it went on"
            groups = found["group_id"].tolist()
            assert groups == [group for group in dict.fromkeys(groups) for _ in range(SAMPLES)]
            dealt.update(groups)
            carried += found["carried"].tolist()
            assert set(found["finish_reason"]) <= {"stop", "length"}
            for versions, oldest in zip(
                found["token_versions"].rows(), found["policy_version"].tolist(), strict=True
            ):
                assert versions.tolist() == sorted(versions.tolist())
                assert versions.min() == oldest and versions.max() < step
                mixed += len(set(versions.tolist())) > 1
            lengths = found["response_ids"].lengths
            assert lengths.max() <= 64 and lengths.min() >= 1
            for handle in handles:
                handle.get()
            begun |= set(groups)
        numbered = job.feed.numbered
        kept = trainer.partial._kept.collect()
    assert set(dealt.values()) == {SAMPLES}, "no prompt is trained twice"
    assert set(kept["group_id"].tolist()) | begun == set(range(numbered)), "none is lost"
    assert not set(kept["group_id"].tolist()) & begun
    assert mixed and 1 <= max(carried) <= most


@pytest.mark.long
@pytest.mark.usefixtures("process_group")
def test_as_much_is_learned_as_by_steps_that_wait(tmp_path):
    """Sums, three seeds: the mean accuracy after as many steps is that of runs without."""
    found = {"whole": [], "partial": []}
    for seed in range(3):
        for arm, accuracies in found.items():
            folder = tmp_path / f"{arm}-{seed}"
            run(
                load_config(
                    [
                        *("executor=inline", "rollout=transformers", "devices=cpu"),
                        *(f"run.directory={folder}", f"run.seed={seed}", "trainer.steps=40"),
                        *("eval.every=0", "observe.show_every=0", "observe.samples_every=0"),
                        *(["rollout.partial=0.6"] if arm == "partial" else []),
                    ]
                )
            )
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
            accuracies.append([row["accuracy"] for row in rows if "accuracy" in row])
            carried = [row["partial/carried"] for row in rows if "partial/carried" in row]
            assert bool(carried) == (arm == "partial") and max(carried, default=1) > 0
    begin, whole = np.mean(found["whole"], axis=0)[[0, -1]]
    partial = np.mean(found["partial"], axis=0)[-1]
    assert whole > begin + 0.1 and partial > begin + 0.1
    assert partial > whole - 0.05


SLOW = """
import time

def slow(prompt, response, **row):
    time.sleep(0.1)
    return float(len(response))
"""


@pytest.mark.more
@pytest.mark.vllm
def test_rewards_score_the_first_samples_while_others_are_generated(hosts, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(SLOW)
    given = [f"reward.function={tmp_path}/own.py:slow", "num_devices=2", "ray.address=auto"]
    given += ["rollout.max_tokens=100", "rollout.samples_per_prompt=4", "rollout.partial=null"]
    tables = []
    for streams in (True, False):
        if not streams:
            monkeypatch.setattr("hybridrl.job.worker_groups._scores_beside", lambda *_: False)
        config = load_config([*JOB, f"run.directory={tmp_path / str(streams)}", *given])
        with hosts.job(config) as job:
            batch, (update,) = job.make_trainer().step()
            update.get()
            records = job.executor.take_records()
            names = ["group_id", "response_ids", "rollout_log_probs", "scores", "policy_version"]
            tables.append(batch.collect(names).to_pylist())
        scored = min(r.start for r in records if r.method == "compute_reward")
        generated = max(r.end for r in records if r.phases.get("generate"))
        assert (scored < generated) == streams
        assert sum(r.metrics.get("samples", 0) for r in records) == 32, "each is told of once"
    for streamed, whole in zip(*tables, strict=True):
        assert streamed["group_id"] == whole["group_id"]
        assert streamed["response_ids"] == whole["response_ids"]
        assert streamed["scores"] == whole["scores"]
        assert streamed["rollout_log_probs"] == pytest.approx(whole["rollout_log_probs"], abs=1e-4)

"""What a search proposes also starts: the best plans of random small settings, on devices that seem
quick at one thing and slow at another, take a step here."""

import math
import random

import pytest
from settings import TINY

from hybridrl import load_config
from hybridrl.placement import GENERATOR_ROLE
from hybridrl.planner import job_start as at_start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]
SETTINGS = 20


@pytest.mark.parametrize("seed", range(SETTINGS))
def test_the_best_plan_starts(seed, hosts, tmp_path, monkeypatch):
    draw = random.Random(seed)
    devices = draw.choice([1, 2, 2, 3, 4])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = _probed(draw)
    monkeypatch.setattr(at_start, "probe_job_devices", lambda *job: rates)
    algorithm = draw.choice(["grpo", "ppo", "remax", "rloo", "online_dpo"])
    may_be_stale = algorithm in ("grpo", "ppo")
    settings = [
        *TINY,
        f"algorithm={algorithm}",
        f"algorithm.kl_coefficient={draw.choice([0, 0.1])}",
        f"rollout={draw.choice(['transformers', 'transformers', 'vllm'])}",
        f"num_devices={devices}",
        f"placement.staleness={draw.choice([0, 1]) if may_be_stale else 0}",
        f"model.tiny.layers={draw.choice([2, 3, 4])}",
        *draw.choice(([], ["model.tiny.heads=4", "model.tiny.hidden_size=128"])),
        f"actor.gradient_checkpointing={draw.choice(['none', 'full'])}",
        f"actor.tokens_per_microbatch={draw.choice([64, 4096, 'null'])}",
        f"data.prompts_per_step={draw.choice([3, 8])}",
        f"rollout.samples_per_prompt={draw.choice([2, 5])}",
        "ray.address=auto",  # where there may be more devices than this machine has cores
        *("placement=auto", "warmup.steps=0", "eval.prompts=8"),
        f"placement.lengths={draw.choice(['null', '4+2', '5+1.5..3'])}",
    ]
    with hosts.job(load_config([*settings, f"run.directory={tmp_path / 'run'}"])) as job:
        trainer = job.make_trainer()
        for _ in range(2):
            _, handles = trainer.step()
            updates = [handle.get() for handle in handles]
        figures = {name: value for update in updates for name, value in update.items()}
        separated = GENERATOR_ROLE in job.placement.roles
        cuts = {name: str(place.parallel) for name, place in job.placement.roles.items()}
    assert math.isfinite(figures["loss"]), (separated, cuts)


def _probed(draw):
    """Devices as no machine has them: the search then cuts and parts what it never would here."""
    rate, link = 10 ** draw.uniform(8, 12), 10 ** draw.uniform(6, 12)
    return {
        "forward": rate,
        "training": rate / draw.uniform(1, 3),
        "forward_overhead": 10 ** draw.uniform(-6, -3),
        "training_overhead": 10 ** draw.uniform(-6, -3),
        "memory": 10 ** draw.uniform(8, 12),
        "link": link,
        "network": link,
        "sums": draw.uniform(1, 3),
        "small_op": 10 ** draw.uniform(-7, -4),
    }

"""Jobs with a cache: a second run of the same job computes nothing that the first has kept, and
learns the same."""

import contextlib
import json

import pytest

from hybridrl import Job, load_config
from hybridrl.console.console_choice import make_console
from hybridrl.run import loop

pytestmark = pytest.mark.usefixtures("process_group")

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "model.dtype=float32"),
    *("model.tiny={hidden_size: 32, layers: 1, heads: 1}", "warmup.steps=0", "eval.prompts=4"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens=3"),
    *("trainer.steps=2", "observe.show_every=0", "observe.samples_every=0"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
]


def run(folder, name, *overrides):
    """What a job wrote of each step."""
    directory = f"run.directory={folder / name}"
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(Job(load_config([*SMALL, directory, *overrides])))
        with make_console(1, "test") as view:
            loop.RunLoop(job, view).run()
        lines = (job.directory.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def rates(steps, kind):
    return [step.get(f"cache/{kind}_hit_rate") for step in steps]


def losses(steps):
    return [(step["policy/loss"], step["policy/grad_norm"]) for step in steps]


def test_dpo(tmp_path):
    cache = ["cache.use=[log_probs]", f"cache.folder={tmp_path}/cache"]
    plain = run(tmp_path, "plain", "algorithm=dpo")
    first, second = (run(tmp_path, name, "algorithm=dpo", *cache) for name in ("first", "second"))
    assert rates(plain, "log_probs") == [None, None]
    assert rates(first, "log_probs")[0] == 0.0 and rates(second, "log_probs") == [1.0, 1.0]
    assert losses(plain) == losses(first) == losses(second)


def test_grpo_with_a_kl(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(response):\n    return float(len(response.strip('1')))\nscore.cache = True\n"
    )
    job = [
        *("algorithm=grpo", "algorithm.kl_coefficient=0.1"),
        f"reward.function={tmp_path}/mine.py:score",
    ]
    cache = ["cache.use=[log_probs,verdicts]", f"cache.folder={tmp_path}/cache"]
    plain = run(tmp_path, "plain", *job)
    first, second = (run(tmp_path, name, *job, *cache) for name in ("first", "second"))
    assert rates(second, "log_probs") == rates(second, "verdicts") == [1.0, 1.0]
    assert rates(first, "log_probs")[0] < 1.0 and rates(plain, "verdicts") == [None, None]
    # A response of the second step may equal one of the first, so that others are computed alone.
    for steps in (first, second):
        assert losses(steps)[0] == losses(plain)[0]
        assert losses(steps)[1] == pytest.approx(losses(plain)[1], rel=1e-4)
    rewards = [[step["reward/mean"] for step in steps] for steps in (plain, first, second)]
    assert rewards[0] == rewards[1] == rewards[2]

"""Generation that no step waits for: partial rollouts, and rewards beside generation.

    python benchmarks/unwaited_generation.py [--only partial] [--seeds 0 1 2] [--steps 40]

* partial: sums below 80, answered by a tiny model that has learned to write on after its answer,
  mostly for a few tokens and at times for a hundred. Steps that wait for all samples, against steps
  that go on when `SHARE` of the prompts are complete (`rollout.partial`), with vLLM: tokens learned
  from a second, and the accuracy on held-out sums after as many steps. Both arms of a seed begin
  with one model, and their runs take turns.
* rewards: a reward function that takes two seconds a batch, on two hosts that generate with vLLM.
  What it adds to a step, against what it adds where all samples are waited for first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import SMOKE, report

from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.tasks import arithmetic
from hybridrl.job import worker_groups
from hybridrl.job.config_resolution import load_config
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model

SHARE = 0.8
LONG_SHARE, SHORT_TAIL, LONG_TAIL = 0.03, 3, 90
"""Of the answers so many go on for longer; tokens that follow an answer, on average."""
SHAPE = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 512}
QUIET = ("observe.samples_every=0", "observe.show_every=0", "eval.every=0")
BATCH_SECONDS, ROWS = 2.0, 64
REWARD = f"""
import re, time

def leading(prompt, response, answer, **row):
    found = re.match(r"[0-9]+", response)
    return float(found is not None and found.group() == answer)

def slow(prompt, response, **row):
    time.sleep({BATCH_SECONDS / ROWS} * 2)  # two hosts score
    return float(len(response) % 7)

def quick(prompt, response, **row):
    return float(len(response) % 7)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["partial", "rewards"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=4 if SMOKE else 25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "own.py").write_text(REWARD)
        if options.only in (None, "partial"):
            measure_partial(folder, options.seeds[:1] if SMOKE else options.seeds, options.steps)
        if options.only in (None, "rewards"):
            measure_rewards(folder, 3 if SMOKE else 8)


def measure_partial(folder: Path, seeds: Sequence[int], steps: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {"partial": [], "whole": []}
    for seed in seeds:
        make_data(folder, seed)
        tokenizer = build_character_tokenizer(arithmetic.CHARACTERS)
        blank = make_tiny_model(folder / f"blank-{seed}", tokenizer, seed=seed, **SHAPE)
        begin = folder / f"begin-{seed}"
        train(
            *(begin, f"run.seed={seed}", f"model.path={blank}", "algorithm=sft", "data=jsonl"),
            *(f"data.path={folder}/sft.jsonl", "data.response_column=response"),
            *("data.max_response_tokens=400", f"trainer.steps={40 if SMOKE else 300}"),
            *("data.prompts_per_step=128", "actor.optimizer.learning_rate=2e-3"),
        )
        for arm in (list(found), list(reversed(found)))[seed % 2]:
            extra = [f"rollout.partial={SHARE}"] if arm == "partial" else []
            rows = train(
                *(folder / f"{arm}-{seed}", f"run.seed={seed}", f"model.path={begin}/model"),
                "num_devices=1",
                *("data=jsonl", f"data.path={folder}/train.jsonl", "rollout.max_tokens=400"),
                *(f"data.eval_path={folder}/test.jsonl", "eval.prompts=256"),
                *("data.prompts_per_step=64", "rollout.samples_per_prompt=4"),
                *(f"reward.function={folder}/own.py:leading", f"trainer.steps={steps}"),
                *("rollout.max_sequences=512", "actor.optimizer.learning_rate=3e-4", *extra),
                inline=SMOKE,
            )
            of_steps = [row for row in rows if "time/step" in row]
            tail = statistics.mean(
                row["response/length_max"] / row["response/length_mean"] for row in of_steps
            )
            tokens = sum(row["policy/tokens"] for row in of_steps)
            speed = tokens / sum(row["time/step"] for row in of_steps)
            accuracy = [row["accuracy"] for row in rows if "accuracy" in row]
            print(
                f"# seed {seed}, {arm}: {speed:.0f} tokens/s, longest / mean {tail:.1f}, accuracy "
                f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}",
                flush=True,
            )
            found[arm].append((speed, accuracy[-1]))
    ours, whole = (np.median(found[arm], axis=0).tolist() for arm in found)
    report("partial_rollouts_tokens", ours[0], whole[0], ">= 1.3", "tokens/s")
    report("partial_rollouts_accuracy", ours[1], whole[1], ">= 0.97", "accuracy")


def make_data(folder: Path, seed: int) -> None:
    """Sums with answers that go on, and the same sums without."""
    random = np.random.default_rng(seed)
    parts = dict(zip(("train", "test"), arithmetic.problems(256, seed), strict=True))
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    for row in parts["train"] * 4:
        mark, mean = ("+", LONG_TAIL) if random.random() < LONG_SHARE else ("=", SHORT_TAIL)
        tail = mark * min(380, random.geometric(1 / mean))
        lines.append(json.dumps({"prompt": row["prompt"], "response": row["answer"] + tail}))
    (folder / "sft.jsonl").write_text("\n".join(lines))


def measure_rewards(folder: Path, steps: int) -> None:
    # With a hundred characters an answer ends seldom, so that lengths are spread up to the limit.
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS)
    shape = SHAPE | {"layers": 12}  # so deep that generation takes longer than the rewards
    model = make_tiny_model(folder / "random", tokenizer, seed=0, **shape)
    prompts = [json.dumps({"prompt": f"Tell me of {number}"}) for number in range(400)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    streams = worker_groups._scores_beside
    seconds: dict[str, list[float]] = {"beside": [], "after": [], "quick": []}
    for number in range(1 if SMOKE else 2):
        for arm, times in seconds.items():
            worker_groups._scores_beside = streams if arm == "beside" else lambda *_: False
            rows = train(
                *(folder / f"rewards-{arm}-{number}", "num_devices=2", f"model.path={model}"),
                *("data=jsonl", f"data.path={folder}/prompts.jsonl", "data.answer_column=null"),
                *("data.prompts_per_step=16", "rollout.samples_per_prompt=4", "eval.prompts=8"),
                f"reward.function={folder}/own.py:{'quick' if arm == 'quick' else 'slow'}",
                *("rollout.max_tokens=400", f"trainer.steps={steps}", "reward.processes=1"),
                "actor.optimizer.learning_rate=1e-9",
                inline=False,
            )
            times += [row["time/step"] for row in rows if "time/step" in row][2:]
            print(f"# {arm}: {statistics.median(times):.2f} s a step", flush=True)
    worker_groups._scores_beside = streams
    beside, after, quick = (statistics.median(seconds[arm]) for arm in seconds)
    report("rewards_beside_generation", beside - quick, after - quick, "<= 0.3", "s")


def train(folder: Path, *settings: str, inline: bool = True) -> list[dict[str, Any]]:
    """Run a job, and return the rows of its metrics."""
    here = ["executor=inline", "rollout=transformers"] if inline else []
    with contextlib.redirect_stdout(sys.stderr):
        run(load_config([*here, "devices=cpu", *QUIET, *settings, f"run.directory={folder}"]))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()

"""Samples that a curriculum saves: sums by their pass rate against sums in any order.

    python benchmarks/curriculum.py [--seeds 0 1 2] [--steps 60] [--keep FILE]

The tiny model of the default job, after its supervised warm-up, adds numbers below 40. Both arms of
a seed begin with it, on the default job's rows, half of which it can do by then, and on as many
again and half as many of reasoning-gym's `chain_sum` with numbers of four digits, which are too
hard for it. Their runs take turns, and differ by `data.sampler` alone. Counted are the samples
until greedy answers have `GAIN` more of the held-out rows right, which are of the same mixture;
between two evaluations it is interpolated. An arm that never does counts as if it had with its last
sample. Nothing here depends on time. `--keep` notes each run as it ends, and what a file has of
them is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import report
from reasoning_gym import create_dataset

from hybridrl.data.tasks import arithmetic
from hybridrl.job.config_resolution import load_config
from hybridrl.main import run

GAIN = 0.04
"""A share of the held-out rows."""
HELD_OUT = 256
"""Rows of small numbers."""
LARGE = 1.5
"""Rows of large numbers for each of small ones."""
EVERY = 4
"""Steps between two evaluations."""
PROMPTS, SAMPLES = 128, 8
"""Of a step, and of each prompt."""
ARMS = {"uniform": [], "pass_rate": ["data.sampler=pass_rate"]}
COMMON = ("executor=inline", "rollout=transformers", "observe.samples_every=0")
COMMON += ("observe.show_every=0", "data.max_prompt_tokens=16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    known: list[dict[str, Any]] = []
    if options.keep and options.keep.exists():
        known = [json.loads(line) for line in options.keep.read_text().splitlines()]
    ratios = []
    for seed in options.seeds:
        wanted: dict[str, float] = {}
        begin = None
        for arm in ARMS:
            key = {"arm": arm, "seed": seed, "steps": options.steps}
            found = next((one for one in known if key.items() <= one.items()), None)
            if found is None:
                begin = begin or Beginning(seed)
                found = key | {"curve": begin.train(arm, options.steps)}
                if options.keep:
                    with options.keep.open("a") as file:
                        file.write(json.dumps(found) + "\n")
            wanted[arm] = samples_to_gain(found["curve"])
        name = f"samples to {GAIN:.0%} more of the held-out sums, seed {seed}"
        report(name, wanted["pass_rate"], wanted["uniform"], "report", "samples")
        ratios.append(wanted["pass_rate"] / wanted["uniform"])
    report(
        "samples of a curriculum, median", statistics.median(ratios), 1.0, "<= 0.8", "of uniform"
    )


class Beginning:
    """The data of a seed, and the model that both arms begin with."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._files = tempfile.TemporaryDirectory()
        self._folder = folder = Path(self._files.name)
        parts = dict(zip(("train", "test"), arithmetic.problems(HELD_OUT, seed), strict=True))
        large = large_sums(seed)
        for name, small in parts.items():
            rows = [{**row, "difficulty_digits": 2} for row in small]
            rows += [next(large) for _ in range(round(LARGE * len(small)))]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        self._run("begin", "trainer.steps=1", "eval.every=0")

    def _asked(self) -> list[str]:
        """Settings of the sums, and of how they are scored."""
        folder = self._folder
        return [
            *(f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/test.jsonl"),
            *("data=jsonl", f"model.path={folder}/begin/model"),
            *("rollout.max_tokens=7", "rollout.max_sequences=512", "eval.prompts=1024"),
        ]

    def train(self, arm: str, steps: int) -> list[tuple[int, float]]:
        """The samples and the accuracy of each evaluation of a run."""
        self._run(
            *(arm, *self._asked(), f"eval.every={EVERY}", f"trainer.steps={steps}"),
            *(f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
            *("actor.optimizer.learning_rate=5e-4", "actor.optimizer.warmup_steps=5"),
            *ARMS[arm],
        )
        return self._curve(arm)

    def _curve(self, name: str) -> list[tuple[int, float]]:
        lines = (self._folder / name / "metrics.jsonl").read_text().splitlines()
        found = [row for row in map(json.loads, lines) if "accuracy" in row]
        return [(row["step"] * PROMPTS * SAMPLES, row["accuracy"]) for row in found]

    def _run(self, name: str, *further: str) -> None:
        print(f"# seed {self._seed}: run {name}", flush=True)
        own = [f"run.directory={self._folder / name}", f"run.seed={self._seed}"]
        with contextlib.redirect_stdout(sys.stderr):
            run(load_config([*COMMON, *own, *further]))


def large_sums(seed: int) -> Iterator[dict[str, Any]]:
    """Rows of numbers with four digits."""
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 4, "max_digits": 4}
    made = create_dataset("chain_sum", **options, seed=seed, size=20_000)
    for entry in map(made.__getitem__, range(len(made))):
        expression = entry["metadata"]["expression"].replace(" ", "")
        if "+" in expression:
            yield {
                "prompt": f"{expression}=",
                "answer": entry["answer"],
                "difficulty_digits": 4,
            }


def samples_to_gain(curve: list[tuple[int, float]]) -> float:
    """How many samples it took; all there were if it was never reached."""
    target = curve[0][1] + GAIN
    for (before, low), (after, high) in pairwise(curve):
        if high >= target:
            return before + (target - low) / (high - low) * (after - before)
    return curve[-1][0]


if __name__ == "__main__":
    main()

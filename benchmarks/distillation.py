"""How many samples a student needs to be as good as its teacher: distillation against GRPO.

    python benchmarks/distillation.py [--seeds 0 1 2] [--folder FOLDER]

The teacher is what the default job of GRPO makes of the tiny model: `a+b=` with numbers below 40.
The student is a model of the same size after a few supervised steps. From there it learns by
`algorithm=distillation` (reverse KL) and, the baseline, by GRPO; both with 128 prompts a step, at a
constant rate. What counts is the number of samples after which greedy accuracy on 256 held-out
prompts is within 0.05 of the teacher's, looked at every fourth step. Nothing depends on time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import SMOKE, report

from hybridrl import load_config
from hybridrl.main import run

WITHIN = 0.05
PROMPTS = 128
INLINE = [
    "executor=inline",
    "rollout=transformers",
    "observe.samples_every=0",
    "observe.show_every=0",
]
FROM_STUDENT = [
    *("warmup.steps=0", "eval.every=4", f"data.prompts_per_step={PROMPTS}"),
    *("actor.optimizer.schedule=constant", "actor.optimizer.warmup_steps=5"),
]
ARMS = {
    "distillation": [
        *("algorithm=distillation", "distillation.loss=reverse", "rollout.samples_per_prompt=1"),
        *("actor.optimizer.learning_rate=1e-3", "trainer.steps=300"),
    ],
    "grpo": [
        *("algorithm=grpo", "rollout.samples_per_prompt=8"),
        *("actor.optimizer.learning_rate=5e-4", "trainer.steps=120"),
    ],
}
SMALLEST = ["trainer.steps=2", "data.prompts_per_step=8", "eval.prompts=8"] if SMOKE else []
SAMPLES = {"distillation": PROMPTS, "grpo": 8 * PROMPTS}
"""Of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    needed: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in options.seeds:
        teacher = trained(folder / f"teacher-{seed}", seed)
        goal = accuracies(teacher)[-1][1] - WITHIN
        student = trained(
            folder / f"student-{seed}",
            seed,
            *("algorithm=sft", "trainer.steps=120", "actor.optimizer.learning_rate=2e-3"),
            "eval.every=0",
        )
        for arm, settings in ARMS.items():
            taught = [f"models.teacher.path={teacher / 'model'}"] if arm == "distillation" else []
            learner = trained(
                folder / f"{arm}-{seed}",
                seed,
                *(f"model.path={student / 'model'}", *FROM_STUDENT, *settings, *taught),
            )
            seen = accuracies(learner)
            reached = next((step for step, accuracy in seen if accuracy >= goal), None)
            # One that never gets there has needed more than all.
            samples = (seen[-1][0] if reached is None else reached) * SAMPLES[arm]
            needed[arm].append(samples)
            said = "" if reached is not None else ", and is not there"
            print(
                f"seed {seed}: {arm} from {seen[0][1]:.2f}, goal {goal:.2f}: {samples:,} samples, "
                f"best {max(accuracy for _, accuracy in seen):.2f}{said}",
                flush=True,
            )
    ours, baseline = (statistics.median(needed[arm]) for arm in ARMS)
    report("samples to the teacher's accuracy", ours, baseline, "less than 1", "samples")


def trained(folder: Path, seed: int, *settings: str) -> Path:
    """The folder of a run, which is made if it is not there."""
    if not (folder / "model").is_dir():
        print(f"# training {folder.name}", flush=True)
        own = [f"run.directory={folder}", f"run.seed={seed}"]
        run(load_config([*INLINE, *own, *settings, *SMALLEST]))
    return folder


def accuracies(folder: Path) -> list[tuple[int, float]]:
    """Steps and accuracies of a run's evaluations."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]


if __name__ == "__main__":
    main()

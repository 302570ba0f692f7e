"""Cores of their own for stages that work beside each other, and waiting for data.

    python benchmarks/core_isolation.py [--rounds 3] [--steps 20] [--burn 0.02]

* isolation: two hosts generate with vLLM on two cores, and the reward of each sample burns CPU
  beside them. Steps with `resources=auto`, when it has chosen, against `resources=fixed`; the runs
  take turns. What `auto` says of its choice is printed: where it pins nothing, its figures are why.
* data: the share of a step that waits for data, in these runs and in supervised fine-tuning,
  against the goal of 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import SMOKE, interleave, report

from hybridrl.job.config_resolution import load_config
from hybridrl.main import run
from hybridrl.run.watchers.core_isolation import WINDOW

SHAPE = "model.tiny={hidden_size: 64, layers: 2, heads: 2, context: 512}"
QUIET = ("observe.samples_every=0", "observe.show_every=0", "eval.every=0", "eval.prompts=8")
CHOSEN_AFTER = 2 * (WINDOW + 1)
"""Steps until `auto` has measured, tried and chosen."""
MOST_WAITING = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12 if SMOKE else 20)
    parser.add_argument("--burn", type=float, default=0.02, help="CPU seconds of a reward")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "burning.py").write_text(
            "import time\n\n"
            "def score(prompt, response, **row):\n"
            f"    until = time.process_time() + {options.burn}\n"
            "    while time.process_time() < until:\n"
            "        pass\n"
            "    return float(len(response) % 7)\n"
        )
        waited: list[float] = []

        def seconds_of(resources: str) -> float:
            rows = train(
                *(folder, f"resources={resources}", f"trainer.steps={options.steps}"),
                *("num_devices=2", "warmup.steps=0", "data.prompts_per_step=16"),
                *("rollout.samples_per_prompt=4", f"rollout.max_tokens={64 if SMOKE else 400}"),
                *(f"reward.function={folder}/burning.py:score", "reward.processes=1"),
                "actor.optimizer.learning_rate=1e-9",  # responses stay as long as they are
            )[CHOSEN_AFTER:]
            waited.extend(row["share/data"] for row in rows)
            return statistics.median(row["time/step"] for row in rows)

        ours, without = interleave(
            lambda: seconds_of("auto"), lambda: seconds_of("fixed"), options.rounds
        )
        report("core_isolation_step", ours, without, "<= 0.85 if it pins, else 1", "s")
        report("waiting_for_data_grpo", statistics.mean(waited), MOST_WAITING, "<= 1", "share")
        rows = train(folder, "algorithm=sft", "num_devices=2", f"trainer.steps={options.steps}")
        shares = [row["share/data"] for row in rows[2:]]
        report("waiting_for_data_sft", statistics.mean(shares), MOST_WAITING, "<= 1", "share")


def train(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run a job, print what it says of cores, and return the metrics of its steps."""
    place = folder / f"run-{len(list(folder.iterdir()))}"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        run(load_config(["devices=cpu", SHAPE, *QUIET, *settings, f"run.directory={place}"]))
    for line in shown.getvalue().splitlines():
        if "resources=auto" in line and "the first steps" not in line:
            print(f"# {line.strip()}", flush=True)
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/step" in row]


if __name__ == "__main__":
    main()

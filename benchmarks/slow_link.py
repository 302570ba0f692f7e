"""What fewer bytes are worth where links are slow, and whether as much is learned.

    python benchmarks/slow_link.py [--rounds 2] [--steps 6]     a step's time
    python benchmarks/slow_link.py --rewards [--seeds 0 1 2]    what is learned

Two hosts (network namespaces; see tests/netlab.py; needs root) are nodes of one Ray cluster.

A step's time: a core each, a link of 100 Mbit/s. One host trains a model of 19 million parameters
in bfloat16 by GRPO at the default learning rate, the other generates (placement=separation), so
that each step waits for weights. Jobs with `rollout.weight_sync=auto` and with `full` take turns;
of each job's steps the median counts, without the first three.

What is learned: the built-in task, trained on a rank of each host with
`actor.parallel.gradients=two_level_int4` (4 bits all the way) and weights that come to a generator
on each host as `int4_delta`, against full precision. The link is not limited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from figures import interleave, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network, ray_nodes

RATE = "100mbit"
WARM_UP_STEPS = 3
STEP = [
    *("model.tiny.hidden_size=512", "model.tiny.layers=6", "model.tiny.heads=8"),
    *("model.dtype=bfloat16", "num_devices=2", "placement=separation", "rollout=transformers"),
    *("warmup.steps=0", "eval.prompts=8", "eval.every=0", "actor.optimizer.learning_rate=1e-6"),
    *("rollout.max_tokens=12", "rollout.min_tokens=12", "data.prompts_per_step=4"),
    *("rollout.samples_per_prompt=4", "reward.function=length", "reward.options.length.limit=8"),
    *("reward.options.length.ramp=8", "observe.samples_every=0", "observe.show_every=0"),
    "guard.most_mismatch=10",
]
LEARN = [
    *("num_devices=4", "placement=explicit", "placement.roles.actor.devices=[0,2]"),
    *("placement.roles.generator.devices=[1,3]", "placement.roles.reward.devices=[1,3]"),
    *("rollout=transformers", "eval.every=0"),
    *("data.prompts_per_step=64", "trainer.steps=60", "eval.prompts=400", "observe.show_every=0"),
]
FEW = ["actor.parallel.gradients=two_level_int4", "rollout.weight_sync=int4_delta"]
FULL = ["actor.parallel.gradients=full", "rollout.weight_sync=full"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rewards", action="store_true", help="what is learned, not how fast")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        if options.rewards:
            compare_rewards(Path(folder), options.seeds)
        else:
            compare_steps(Path(folder), options.rounds, options.steps)


def compare_steps(folder: Path, rounds: int, steps: int) -> None:
    """Jobs over the slow link take turns."""
    with network(2, RATE, cpus=[{0}, {1}]) as hosts, ray_nodes(hosts, cpus=1) as nodes:

        def step_seconds(method: str) -> float:
            settings = [*STEP, f"rollout.weight_sync={method}"]
            settings.append(f"trainer.steps={WARM_UP_STEPS + steps}")
            rows = run(hosts[0], folder, settings, nodes[0].cluster)
            seen = [row for row in rows if "time/step" in row][WARM_UP_STEPS:]
            names = ("time/step", "time/generate", "time/train", "time/sync")
            shown = {name: statistics.median(row.get(name, 0.0) for row in seen) for name in names}
            print(f"{method}: {shown}", file=sys.stderr)
            return shown["time/step"]

        arms = [lambda m=m: step_seconds(m) for m in ("auto", "full")]
        report("slow_link.step", *interleave(*arms, rounds), "<= 0.67", "s")


def compare_rewards(folder: Path, seeds: Sequence[int]) -> None:
    """Pairs of jobs with the same seed."""
    found: dict[str, list[float]] = {"few": [], "full": []}
    with network(2, None) as hosts, ray_nodes(hosts, cpus=2) as nodes:
        for seed in seeds:
            for name, arm in (("few", FEW), ("full", FULL)):
                settings = [*LEARN, *arm, f"run.seed={seed}"]
                rows = run(hosts[0], folder, settings, nodes[0].cluster)
                found[name].append([row["accuracy"] for row in rows if "accuracy" in row][-1])
            report(f"slow_link.accuracy.seed_{seed}", *(runs[-1] for runs in found.values()),
                   "report", "share")  # fmt: skip
    few, full = (statistics.mean(runs) for runs in found.values())
    noise = max(found["full"]) - min(found["full"])
    goal = f"within {noise:.3f}, by which seeds differ"
    report("slow_link.accuracy.mean", few, full, goal, "share")


def run(host: Host, folder: Path, settings: Sequence[str], address: str) -> list[dict[str, float]]:
    """What a job's metrics file has, line by line."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    own = [f"ray.address={address}", f"run.directory={directory}"]
    host.run([sys.executable, "-m", "hybridrl.main", *settings, *own], timeout=1200)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(f"A job took longer than {error.timeout} s.")

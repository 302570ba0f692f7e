"""What a placement is worth. Every arm is a job of its own whose steps are the built-in trainers'.

* overlap: reference and reward that take equally long, each on a device of its own, against one
  after the other on one device; for GRPO, PPO, ReMax and Safe-RLHF. What is measured is the time
  in a step that either works. Their work is waiting, so the two cores of a small machine do not
  decide.
* scoring, over two hosts with a link of 400 Mbit/s, a core each (network namespaces; see
  tests/netlab.py; needs root): reference and reward model at the same time on half of the devices
  each (interleaving) against one after the other on all of them (flattening), in steps of PPO.
* step, over the same hosts: a whole step of GRPO, generation on one host while the other trains
  (separation with staleness 1) against both on both, taking turns.

Jobs of the two arms take turns, and each begins anew. `--keep FOLDER` keeps their run directories.

    python benchmarks/placement.py [--only overlap] [--rounds 2] [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import interleave, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network, ray_nodes

RATE = "400mbit"
MODEL = ["model.tiny.hidden_size=512", "model.tiny.layers=6", "model.tiny.heads=8"]
JOB = [*MODEL, "num_devices=2", "warmup.steps=0", "eval.prompts=8", "eval.every=0"]
STEP = [
    *("rollout=transformers", "rollout.max_tokens=24", "rollout.min_tokens=24"),
    "guard.most_mismatch=10",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "reward.function=length"),
    *("reward.options.length.limit=8", "reward.options.length.ramp=8"),
    *("observe.samples_every=0", "observe.show_every=0"),
]
WARM_UP_STEPS = 3
SCORERS = (("reference", "compute_ref_log_prob"), ("reward", "compute_reward"))
SECONDS = 2.0
"""That each of the two takes for all of its calls in a step, of which ReMax's reward has two."""
SLOW = [
    *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2", "num_devices=2"),
    *("warmup.steps=0", "eval.prompts=8", "rollout=transformers", "algorithm.kl_coefficient=0.1"),
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"),
    "placement=explicit",
]
EVERYWHERE = {
    "grpo": ("actor",),
    "ppo": ("actor", "critic"),
    "remax": ("actor",),
    "safe_rlhf": ("actor", "critic", "cost_critic", "cost"),
}
"""Roles beside reference and reward, whose devices the arms choose."""
COST = ["cost.function=length", "cost.options.length.limit=2"]
APART = ["placement.roles.reference.devices=[0]", "placement.roles.reward.devices=[1]"]
TOGETHER = ["placement.roles.reference.devices=[0]", "placement.roles.reward.devices=[0]"]
SCORED = [
    *("algorithm=ppo", "algorithm.kl_coefficient=0.1", "reward.function=[]"),
    *("rollout=transformers", "rollout.max_tokens=24", "rollout.min_tokens=24"),
    "guard.most_mismatch=10",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=["overlap", "scoring", "step"])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--score", nargs="+", metavar="OVERRIDE", help="(for itself)")
    parser.add_argument("--slowly", action="store_true", help="(for itself)")
    options = parser.parse_args()
    if options.score:
        print(json.dumps(scoring(options.score, options.steps, options.slowly)))
        return
    folder = options.keep or Path(tempfile.mkdtemp(prefix="placement-"))
    if options.only in (None, "overlap"):
        for algorithm in EVERYWHERE:
            arms = [
                lambda a=a, d=d: overlap_seconds(folder, a, d)
                for a, d in ((algorithm, APART), (algorithm, TOGETHER))
            ]
            ours, baseline = interleave(*arms, options.rounds)
            report(f"placement_overlap_{algorithm}", ours, baseline, "<= 0.6", "s")
    if options.only == "overlap":
        return
    model = make_model(folder)
    with (
        network(2, RATE, cpus=[{0}, {1}]) as hosts,
        ray_nodes(hosts, cpus=1) as nodes,
    ):
        host, address = hosts[0], nodes[0].cluster
        if options.only != "step":
            arms = [
                lambda p=p: scoring_seconds(host, folder, model, p, address)
                for p in ("interleaving", "flattening")
            ]
            ours, baseline = interleave(*arms, options.rounds)
            report("placement_interleaving_scoring", ours, baseline, "<= 0.12", "s")
        if options.only != "scoring":
            separation = ["placement=separation", "placement.staleness=1"]
            arms = [
                lambda p=p: step_seconds(host, folder, p, address, options.steps)
                for p in (separation, ["placement=flattening"])
            ]
            ours, baseline = interleave(*arms, options.rounds)
            report("placement_separation_step", ours, baseline, "<= 0.48", "s")


def make_model(folder: Path) -> Path:
    """The model of the scoring arm, which every host can read."""
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.data.tasks.arithmetic import CHARACTERS
    from hybridrl.models.model_loading import make_tiny_model

    # Larger than what FSDP gathers whole, and keeps (`hybridrl.parallel.fsdp`), as real models are.
    shape = {"hidden_size": 768, "layers": 10, "heads": 12, "context": 128}
    return make_tiny_model(folder / "model", build_character_tokenizer(CHARACTERS), seed=0, **shape)


def overlap_seconds(folder: Path, algorithm: str, devices: Sequence[str]) -> float:
    """Median over the steps of a job of the time in which somebody scores."""
    run = tempfile.mkdtemp(prefix=f"{algorithm}-", dir=folder)
    command = [
        *(sys.executable, __file__, "--steps", "3", "--slowly", "--score"),
        *(*SLOW, f"algorithm={algorithm}", *devices, f"run.directory={run}"),
        *(f"placement.roles.{role}.devices=[0,1]" for role in EVERYWHERE[algorithm]),
        *(COST if algorithm == "safe_rlhf" else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(done.stderr)
    return statistics.median(json.loads(done.stdout.strip().splitlines()[-1]))


def scoring_seconds(host: Host, folder: Path, model: Path, placement: str, address: str) -> float:
    """Median over the steps of a job of the time in which somebody scores."""
    run = tempfile.mkdtemp(prefix=f"{placement}-", dir=folder)
    command = [
        *(sys.executable, __file__, "--steps", "3", "--score", *JOB, *SCORED),
        *(f"placement={placement}", f"model.path={model}", f"reward.model={model}"),
        *(f"ray.address={address}", f"run.directory={run}"),
    ]
    printed = host.run(command, timeout=900)  # PPO sends gigabytes over that link
    return statistics.median(json.loads(printed.strip().splitlines()[-1]))


def scoring(overrides: Sequence[str], steps: int, slowly: bool) -> list[float]:
    """Seconds of each step of a job's trainer in which its reference or its reward works, of steps
    as the loop makes them."""
    from hybridrl import Job, load_config

    config = load_config(list(overrides))
    if slowly:
        make_scorers_slow(config.trainer.name)
    with Job(config) as job:
        trainer = job.make_trainer()
        found = []
        for _ in range(1 + steps):
            _, handles = trainer.step()
            for handle in handles:
                handle.get()
            records = job.executor.take_records(job.executor.end_step())
            spans = [(r.start, r.end) for r in records if (r.role, r.method) in SCORERS]
            found.append(covered(spans))
    return found[1:]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in any of these spans."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def make_scorers_slow(algorithm: str) -> None:
    """Reference and reward take so much longer for a step, whatever they do; the classes travel to
    the hosts by value."""
    import cloudpickle

    from hybridrl.controller import Worker
    from hybridrl.job import worker_groups as roles

    def slow(worker: type[Worker], name: str, seconds: float) -> type[Worker]:
        method = getattr(worker, name)

        def slowly(self: Worker, batch: Any) -> Any:
            time.sleep(seconds)
            return method(self, batch)

        slowly.__transfer__ = method.__transfer__
        return type(worker.__name__, (worker,), {name: slowly})

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    for kind, name in SCORERS:
        worker, keywords = roles.WORKER_BUILDERS[kind]
        calls = 2 if algorithm == "remax" and kind == "reward" else 1
        roles.WORKER_BUILDERS[kind] = (slow(worker, name, SECONDS / calls), keywords)


def step_seconds(host: Host, folder: Path, placement: list[str], address: str, steps: int) -> float:
    """Median time of a step of a job of its own."""
    run = Path(tempfile.mkdtemp(prefix=f"{placement[0].split('=')[1]}-", dir=folder))
    command = [
        *(sys.executable, "-m", "hybridrl.main", *JOB, *STEP, *placement),
        *(f"ray.address={address}", f"run.directory={run}"),
        f"trainer.steps={steps + WARM_UP_STEPS}",
    ]
    host.run(command, timeout=600)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_seen = [row for row in rows if "time/step" in row][WARM_UP_STEPS:]
    names = ("time/step", "time/generate", "time/train", "time/sync", "time/score")
    shown = {name: round(statistics.median(row[name] for row in steps_seen), 2) for name in names}
    print(f"{' '.join(placement)}: {shown}", file=sys.stderr)
    return shown["time/step"]


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(f"A job took longer than {error.timeout} s.")

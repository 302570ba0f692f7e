"""What a placement is worth where devices are far from each other: two hosts with a link of 400
Mbit/s, a core each (network namespaces; see tests/netlab.py; needs root).

* scoring: reference and reward model at the same time on half of the devices each (interleaving)
  against one after the other on all of them (flattening);
* a whole step of GRPO: generation on one host while the other trains (separation with staleness 1)
  against both on both, taking turns.

Jobs of the two arms take turns, and each begins anew. `--keep FOLDER` keeps their run directories.

    python benchmarks/placement.py [--rounds 2] [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import interleave, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network, ray_nodes

RATE = "400mbit"
MODEL = ["model.tiny.hidden_size=512", "model.tiny.layers=6", "model.tiny.heads=8"]
JOB = [*MODEL, "num_devices=2", "warmup.steps=0", "eval.prompts=8", "eval.every=0"]
SAMPLES, PROMPT, RESPONSE = 8, 16, 48
STEP = [
    *("rollout=transformers", "rollout.max_tokens=24", "rollout.min_tokens=24"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "reward.function=length"),
    *("reward.options.length.limit=8", "reward.options.length.ramp=8"),
    *("observe.samples_every=0", "observe.show_every=0", "observe.timeline_every=4"),
]
WARM_UP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", choices=["scoring", "step"])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--score", nargs=2, metavar=("MODEL", "PLACEMENT"), help="(for itself)")
    parser.add_argument("--address", help="(for itself)")
    options = parser.parse_args()
    if options.score:
        print(json.dumps(score(*options.score, options.address)))
        return
    folder = options.keep or Path(tempfile.mkdtemp(prefix="placement-"))
    model = make_model(folder)
    with (
        network(2, RATE, cpus=[{0}, {1}]) as hosts,
        ray_nodes(hosts, cpus=1) as nodes,
    ):
        host, address = hosts[0], nodes[0].cluster
        if options.only != "step":
            arms = [
                lambda p=p: scoring_seconds(host, model, p, address)
                for p in ("interleaving", "flattening")
            ]
            ours, baseline = interleave(*arms, options.rounds)
            report("placement_interleaving_scoring", ours, baseline, "<= 0.833", "s")
        if options.only != "scoring":
            separation = ["placement=separation", "placement.staleness=1"]
            arms = [
                lambda p=p: step_seconds(host, folder, p, address, options.steps)
                for p in (separation, ["placement=flattening"])
            ]
            ours, baseline = interleave(*arms, options.rounds)
            report("placement_separation_step", ours, baseline, "<= 0.8", "s")


def make_model(folder: Path) -> Path:
    """The model of the scoring arm, which every host can read."""
    from hybridrl.data.tasks.arithmetic import CHARACTERS
    from hybridrl.data.tasks.character_tokenizer import build_tokenizer
    from hybridrl.models import make_tiny_model

    # Larger than what FSDP gathers whole, and keeps (`hybridrl.parallel.fsdp`), as real models are.
    shape = {"hidden_size": 768, "layers": 10, "heads": 12, "context": 128}
    return make_tiny_model(folder / "model", build_tokenizer(CHARACTERS), seed=0, **shape)


def scoring_seconds(host: Host, model: Path, placement: str, address: str) -> float:
    """Median of a few scoring phases of a job of its own."""
    command = [sys.executable, __file__, "--score", str(model), placement, "--address", address]
    printed = host.run(command, timeout=300)
    return statistics.median(json.loads(printed.strip().splitlines()[-1]))


def score(model: str, placement: str, address: str) -> list[float]:
    """On a host: seconds until reference and reward model have both scored the same samples."""
    import torch

    from hybridrl import Job, load_config
    from hybridrl.core.batch import Batch

    config = load_config(
        [
            *JOB,
            *(f"placement={placement}", "algorithm=ppo", "algorithm.kl_coefficient=0.1"),
            *(f"model.path={model}", "reward.function=[]", f"reward.model={model}"),
            *("rollout=transformers", f"ray.address={address}"),
            f"run.directory={tempfile.mkdtemp(prefix='score-')}",
        ]
    )
    with Job(config, roles=["reference", "reward"]) as job:
        generator = torch.Generator().manual_seed(0)

        def ids(length: int) -> list[torch.Tensor]:
            rows = torch.randint(3, 12, (SAMPLES, length), generator=generator)
            return list(rows)

        samples = {"prompt_ids": ids(PROMPT), "response_ids": ids(RESPONSE)}
        batch = job.put(Batch.from_columns(samples))
        found = []
        for _ in range(1 + 3):
            begin = time.perf_counter()
            job.groups["reference"].compute_ref_log_prob(batch)
            job.groups["reward"].compute_reward(batch)
            job.executor.take_records()
            found.append(time.perf_counter() - begin)
    return found[1:]


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

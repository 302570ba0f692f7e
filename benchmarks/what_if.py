"""Questions to recorded runs, and what was then measured.

    python benchmarks/what_if.py [name of a question ...] [--steps 8] [--links | --paths]

For each question a job runs as it is and then with what is asked about, over two devices (GRPO with
a reference, a model of 5 million parameters, responses of equal length). The first run is asked how
long a step of the second would take. A figure is predicted / measured, and the replay of each run
as it was. `--links` asks for links of 100, 200 and 400 Mbit/s instead, between two hosts (network
namespaces; see tests/netlab.py; needs root). `--paths` makes something a fifth quicker that is on
the critical path, and something that is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from figures import report

from hybridrl.planner.what_if.questions import WhatIfQuestion, predict_step
from hybridrl.planner.what_if.recorded_run import RecordedRun

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import RAY_ENVIRONMENT, network, ray_nodes

JOB = [
    *("model.tiny.hidden_size=256", "model.tiny.layers=6", "model.tiny.heads=4"),
    *("num_devices=2", "rollout=transformers", "algorithm.kl_coefficient=0.05"),
    *("warmup.steps=0", "eval.prompts=4", "eval.every=0", "actor.optimizer.learning_rate=1e-6"),
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=4"),
    *("rollout.max_tokens=48", "rollout.min_tokens=48", "model.tiny.context=256"),
    "guard.most_mismatch=10",
    *("actor.tokens_per_microbatch=512", "observe.samples_every=0", "observe.show_every=0"),
]
EXPLICIT = [
    *("placement=explicit", "placement.roles.actor.devices=[0,1]"),
    "placement.roles.reward.devices=[0,1]",
]
QUESTIONS: dict[str, tuple[list[str], list[str], WhatIfQuestion]] = {
    "responses twice as long": (
        [],
        ["rollout.max_tokens=96", "rollout.min_tokens=96"],
        WhatIfQuestion(responses=2.0),
    ),
    "twice as many prompts": (
        [],
        ["data.prompts_per_step=16"],
        WhatIfQuestion([("data.prompts_per_step", 16)]),
    ),
    "gradient checkpointing": (
        [],
        ["actor.gradient_checkpointing=full"],
        WhatIfQuestion([("actor.gradient_checkpointing", "full")]),
    ),
    "small micro-batches": (
        [],
        ["actor.tokens_per_microbatch=128"],
        WhatIfQuestion([("actor.tokens_per_microbatch", 128)]),
    ),
    "one device": (["num_devices=2"], ["num_devices=1"], WhatIfQuestion(devices=1)),
    "two devices": (["num_devices=1"], ["num_devices=2"], WhatIfQuestion(devices=2)),
    "reference moved": (
        [*EXPLICIT, "placement.roles.reference.devices=[0,1]"],
        [*EXPLICIT, "placement.roles.reference.devices=[1]"],
        WhatIfQuestion(moves={"reference": [1]}),
    ),
    "a slower reward": (
        ["reward.function=FOLDER/slow.py:slow"],
        ["reward.function=FOLDER/slow.py:slower"],
        WhatIfQuestion(longer={"reward.score": 3.0}),
    ),
}
SLOW = """
import os
import time
from hybridrl.algorithms import TokenLoss

def loss(log_probs, old_log_probs, advantages):
    time.sleep(float(os.environ.get("SLOW_RANK", 0)))
    return TokenLoss(-(log_probs - old_log_probs).exp() * advantages, {})
def quicker(prompts, completions, **columns):
    time.sleep(0.96)
    return [0.5] * len(completions)
def short(prompts, completions, **columns):
    time.sleep(0.4)
    return [0.5] * len(completions)
def shorter(prompts, completions, **columns):
    time.sleep(0.32)
    return [0.5] * len(completions)
def slow(prompts, completions, **columns):
    time.sleep(0.4)
    return [0.5] * len(completions)
def slower(prompts, completions, **columns):
    time.sleep(1.2)
    return [0.5] * len(completions)
"""
PATHS = [
    *("algorithm=safe_rlhf", "placement=explicit", "placement.roles.actor.devices=[0,1]"),
    *("placement.roles.critic.devices=[0]", "placement.roles.cost_critic.devices=[1]"),
    *("placement.roles.reward.devices=[0]", "placement.roles.cost.devices=[1]"),
    *("placement.roles.reference.devices=[0,1]", "data.prompts_per_step=4"),
]
"""Two functions score at the same time, the costs longer than the rewards."""
RATES = {"100 Mbit/s": 100, "200 Mbit/s": 200, "400 Mbit/s": 400}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", nargs="*", metavar="name")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--paths", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of probes, as of the runs
    errors: list[float] = []
    replays: list[float] = []
    with tempfile.TemporaryDirectory(prefix="what-if-") as name:
        folder = Path(name)
        (folder / "slow.py").write_text(SLOW)
        if options.paths:
            speed_up(folder, options.steps)
            return
        if options.links:
            ask_of_links(folder, options.steps, errors, replays)
        else:
            if not options.questions:
                ask_of_a_slow_rank(folder, options.steps, errors, replays)
            for asked in options.questions or QUESTIONS:
                before, after, question = QUESTIONS[asked]
                was = recorded(folder / f"{asked} before", before, options.steps)
                then = recorded(folder / f"{asked} after", after, options.steps)
                compare(asked, was, then, question, errors, replays)
    report("replay of a step, worst", max(replays), 1.0, "<= 0.03", "off")
    report("answers, median", statistics.median(errors), 1.0, "<= 0.1", "off")
    report("answers, worst", max(errors), 1.0, "<= 0.2", "off")


def recorded(
    folder: Path, settings: Sequence[str], steps: int, environment: Mapping[str, str] | None = None
) -> RecordedRun:
    """A run with these settings."""
    print(f"# running: {folder.name}")
    own = [one.replace("FOLDER", str(folder.parent)) for one in settings]
    one_core = {"OMP_NUM_THREADS": "1"}  # so that one device is half of this machine
    done = subprocess.run(
        command(folder, [*JOB, *own], steps),
        env={**os.environ, **one_core, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return RecordedRun.at(folder, steps - 2)


def command(folder: Path, settings: Sequence[str], steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "hybridrl.main", *settings),
        *(f"run.directory={folder}", f"trainer.steps={steps}"),
    ]


def compare(
    name: str,
    was: RecordedRun,
    then: RecordedRun,
    question: WhatIfQuestion,
    errors: list[float],
    replays: list[float],
) -> None:
    said = predict_step(was, question)
    errors.append(abs(said.seconds / then.seconds - 1))
    replays.append(abs(said.replayed / was.seconds - 1))
    print(f"  {name}: {was.seconds:.3f} s before", flush=True)
    report(name, said.seconds, then.seconds, "report", "s")


def ask_of_a_slow_rank(folder: Path, steps: int, errors: list[float], replays: list[float]) -> None:
    """One of two ranks takes 0.3 s longer for each of its micro-batches."""
    job = ["algorithm.policy_loss=FOLDER/slow.py:loss"]
    runs = {}
    for slow in ("0.3", "0"):
        environments = [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "SLOW_RANK": slow}]
        with ray_nodes(nodes=2, cpus=1, environments=environments) as nodes:
            place, address = folder / f"slow {slow}", f"ray.address={nodes[0].cluster}"
            runs[slow] = recorded(place, [*job, address], steps, RAY_ENVIRONMENT)
    question = WhatIfQuestion(fix_slowest=True)
    compare("without the slow rank", runs["0.3"], runs["0"], question, errors, replays)


def speed_up(folder: Path, steps: int) -> None:
    """A fifth off a function that all wait for, and off one that is done before."""
    slow, fast = "cost.function=FOLDER/slow.py:", "reward.function=FOLDER/slow.py:"
    was = recorded(folder / "was", [*PATHS, f"{slow}slower", f"{fast}short"], steps)
    on = recorded(folder / "on", [*PATHS, f"{slow}quicker", f"{fast}short"], steps)
    off = recorded(folder / "off", [*PATHS, f"{slow}slower", f"{fast}shorter"], steps)
    said = predict_step(was, WhatIfQuestion(longer={"cost.score": 0.8}))
    predicted = said.replayed - said.seconds
    report("on the path: shorter by", was.seconds - on.seconds, predicted, ">= 0.8", "s")
    report("off the path: a step", off.seconds, was.seconds, ">= 0.98", "s")
    other = predict_step(was, WhatIfQuestion(longer={"reward.score": 0.8}))
    report("off the path: as predicted", other.seconds, other.replayed, ">= 0.98", "s")


def ask_of_links(folder: Path, steps: int, errors: list[float], replays: list[float]) -> None:
    """Each rate's run is asked about the others'."""
    runs = {}
    for name, rate in RATES.items():
        with network(2, f"{rate}mbit", cpus=[{0}, {1}]) as hosts, ray_nodes(hosts, cpus=1) as nodes:
            place = folder / f"{rate}"
            job = [*JOB, f"ray.address={nodes[0].cluster}"]
            hosts[0].run(command(place, job, steps), timeout=900)
            runs[name] = RecordedRun.at(place, steps - 2)
    for name, was in runs.items():
        for other, then in runs.items():
            if name != other:
                question = WhatIfQuestion(link=RATES[other] / RATES[name])
                compare(f"{name} to {other}", was, then, question, errors, replays)


if __name__ == "__main__":
    main()

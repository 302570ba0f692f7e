"""Whether `placement=auto` chooses what is quickest, and how long its plan says a step is.

    python benchmarks/auto_choice.py [number of a setting ...] [--steps 6] [--rounds 1]

Two hosts (network namespaces; see tests/netlab.py; needs root), a core each, are nodes of one Ray
cluster. Six settings: models of two sizes, links of three rates, responses of equal or of very
different lengths, with and without a reference, a critic, a step behind. Of each setting the
placements run that there are for two devices, and `auto`, whose step is compared with the quickest
of them. Where responses end early, `auto` is told how long those of another run were
(`placement.lengths`); `--unknown`: it is not.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from figures import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from netlab import Host, network, ray_nodes

WARM_UP_STEPS = 2
JOB = [
    *("rollout=transformers", "num_devices=2", "warmup.steps=0", "eval.prompts=4", "eval.every=0"),
    *("actor.optimizer.learning_rate=1e-6", "observe.samples_every=0", "observe.show_every=0"),
    *("model.tiny.context=256", "data.prompts_per_step=8", "rollout.samples_per_prompt=4"),
]
SMALL = ["model.tiny.hidden_size=128", "model.tiny.layers=4", "model.tiny.heads=4"]
LARGE = ["model.tiny.hidden_size=320", "model.tiny.layers=6", "model.tiny.heads=5"]
EQUAL = ["rollout.max_tokens=40", "rollout.min_tokens=40", "guard.most_mismatch=10"]
SPREAD = ["rollout.max_tokens=80", "rollout.temperature=1.2"]
BEHIND = ["placement.staleness=1", "algorithm.correction=truncate"]


class Setting(NamedTuple):
    """One of the six."""

    name: str
    job: list[str]
    rate: str
    behind: bool = False

    @property
    def is_spread(self) -> bool:
        """Whether responses end early."""
        return SPREAD[0] in self.job


SETTINGS = [
    Setting("small, 400 Mbit/s, equal", [*SMALL, *EQUAL], "400mbit"),
    Setting("small, 50 Mbit/s, spread", [*SMALL, *SPREAD, "algorithm=ppo"], "50mbit"),
    Setting("large, 400 Mbit/s, equal, reference",
            [*LARGE, *EQUAL, "algorithm.kl_coefficient=0.05"], "400mbit"),
    Setting("large, 50 Mbit/s, equal", [*LARGE, *EQUAL], "50mbit"),
    Setting("large, 100 Mbit/s, equal, a step behind", [*LARGE, *EQUAL, *BEHIND], "100mbit", True),
    Setting("large, 50 Mbit/s, spread, critic",
            [*LARGE, *SPREAD, "algorithm=ppo", "algorithm.kl_coefficient=0.05"], "50mbit"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, metavar="number")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--unknown", action="store_true")
    options = parser.parse_args()
    losses, errors = [], []
    for number in options.numbers or range(len(SETTINGS)):
        setting = SETTINGS[number]
        with (
            tempfile.TemporaryDirectory(prefix="auto-choice-") as folder,
            network(2, setting.rate, cpus=[{0}, {1}]) as hosts,
            ray_nodes(hosts, cpus=1) as nodes,
        ):
            jobs = candidates(setting) | {"auto": ["placement=auto"]}
            seconds: dict[str, list[float]] = {name: [] for name in jobs}
            planned = []
            places: list[Path] = []
            for _ in range(options.rounds):
                for name, job in jobs.items():
                    place = Path(tempfile.mkdtemp(dir=folder))
                    settings = [*JOB, *setting.job, *job, f"ray.address={nodes[0].cluster}"]
                    if name == "auto" and setting.is_spread and not options.unknown:
                        settings.append(f"placement.lengths={places[-1]}")
                    took, said = run(hosts[0], place, settings, options.steps)
                    places.append(place)
                    seconds[name].append(took)
                    planned += [said] if name == "auto" else []
        medians = {name: statistics.median(some) for name, some in seconds.items()}
        auto = medians.pop("auto")
        best = min(medians, key=lambda name: medians[name])
        print(f"  {setting.name}: " + ", ".join(f"{n} {s:.2f} s" for n, s in medians.items()))
        report(f"auto beside {best}, {setting.name}", auto, medians[best], "<= 1.1", "s")
        report(f"planned step, {setting.name}", statistics.median(planned), auto, "report", "s")
        losses.append(auto / medians[best])
        errors.append(abs(statistics.median(planned) / auto - 1))
    report("settings chosen well", sum(loss <= 1.1 for loss in losses), len(losses), ">= 0.83", "")
    report("planned steps, median", statistics.median(errors), 1.0, "<= 0.15", "off")
    report("planned steps, worst", max(errors), 1.0, "<= 0.25", "off")


def candidates(setting: Setting) -> dict[str, list[str]]:
    """All placements for two devices."""
    found = {"separation": ["placement=separation"]}
    if not setting.behind:
        found["flattening"] = ["placement=flattening"]
        found["scoring with training"] = ["placement=separation", "placement.scoring=training"]
    if any("ppo" in word or "kl_coefficient" in word for word in setting.job):
        scoring = "[critic]" if "algorithm=ppo" in setting.job else "[reference]"
        apart = {"[critic]": "critic", "[reference]": "reference"}[scoring]
        found |= {f"{apart} apart": explicit(setting, apart)}
    return found


def explicit(setting: Setting, apart: str) -> list[str]:
    """The actor on one device, this role on the other."""
    roles = {"actor": 0, "reward": 0, apart: 1}
    if apart == "critic" and any("kl_coefficient" in word for word in setting.job):
        roles["reference"] = 0
    places = [f"placement.roles.{role}.devices=[{device}]" for role, device in roles.items()]
    return ["placement=explicit", *places]


def run(host: Host, folder: Path, settings: Sequence[str], steps: int) -> tuple[float, float]:
    """A step's seconds, the median, and what the plan says of it; 0 without `auto`."""
    last = WARM_UP_STEPS + steps
    own = [f"run.directory={folder}", f"trainer.steps={last}"]
    said = host.run([sys.executable, "-m", "hybridrl.main", *settings, *own], timeout=1200)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends = {row["step"]: row["time/step"] for row in rows if "time/step" in row}
    found = [seconds for step, seconds in ends.items() if step > WARM_UP_STEPS]
    words = r"placement=auto chose (.*?): a step of about\s+([\d.]+)\s+(m?s),"
    chosen = re.search(words, said, re.S)
    if chosen:
        print(f"  auto: {chosen[1]}", flush=True)
    planned = float(chosen[2]) / (1000 if chosen[3] == "ms" else 1) if chosen else 0.0
    return statistics.median(found), planned


if __name__ == "__main__":
    try:
        main()
    except subprocess.TimeoutExpired as error:
        sys.exit(f"A job took longer than {error.timeout} s.")

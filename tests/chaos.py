"""Kills parts of short jobs at random moments, and looks whether anything is lost.

python tests/chaos.py [--rounds 40] [--seed 0] [--kinds driver,inline,host,...] [key=value ...]

Each round is a job of its own. Its driver, a host, the relay, a reward process or a Ray node is
killed, in a third of the rounds while a checkpoint is saved, in a fifth a second time soon after. A
job whose driver was killed is started again by the same command. In the end a round is `ok` if the
job has finished; has repeated no more than what came after the newest checkpoint; has the metrics
and the weights of a job that nobody disturbed, bit for bit; and has left no process, nothing in
shared memory and no half-written checkpoint. Prints a line for each round and a JSON line at last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import netlab
from victims import Victim, shared_memory

KINDS = ("host", "driver", "relay", "reward", "node", "inline")
STEPS = 6
JOB = [
    *("rollout=transformers", "devices=cpu", "warmup.steps=2", f"trainer.steps={STEPS}"),
    *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"),
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=4", "eval.prompts=16"),
    *("eval.every=4", "observe.samples_every=1", "algorithm.kl_coefficient=0.1"),
    *("resume=auto", "recover.wait_s=60"),
]
REWARD = '''
import time

def odd(prompt, response, **row):
    """Differs between most answers, and takes its time, so that there is one for a kill."""
    time.sleep(0.02)
    return float(sum(map(ord, response)) % 7)
'''
SECONDS_TO_END = 30.0
"""So long may anything outlive its driver."""


@dataclass(frozen=True)
class Plan:
    """What is done in a round."""

    kind: str
    every: int
    step: int
    in_save: bool
    pause: float
    number: int
    again_after: float | None
    copies: int = 0

    @classmethod
    def drawn(cls, kind: str, draw: random.Random) -> Plan:
        return cls(
            kind,
            every=draw.choice((1, 2)),
            step=draw.randrange(STEPS - 1),
            in_save=draw.random() < 1 / 3,
            pause=draw.random() * 0.6,
            number=draw.randrange(2),
            again_after=draw.random() * 10 if draw.random() < 0.2 else None,
            copies=draw.randrange(2) if kind != "inline" else 0,
        )

    def __str__(self) -> str:
        moment = "in the save" if self.in_save else f"{self.pause:.2f} s"
        twice = "" if self.again_after is None else f", again after {self.again_after:.1f} s"
        copies = ", copies in memory" if self.copies else ""
        return f"every={self.every}, {moment} after step {self.step}{twice}{copies}"


class Chaos:
    """The rounds, and the jobs that nobody disturbs.

    Args:
        folder: Where the jobs run.
        also: Settings of all jobs.
    """

    def __init__(self, folder: Path, also: Sequence[str] = ()) -> None:
        self._folder, self._also = folder, also
        self._references: dict[tuple[bool, int], Victim] = {}
        (folder / "own.py").write_text(REWARD)

    def settings(self, plan: Plan) -> list[str]:
        """Of a round's job."""
        own = [f"reward.function={self._folder}/own.py:odd", f"checkpoint.every={plan.every}"]
        own += [f"checkpoint.memory_copies={plan.copies}"]
        where = "executor=inline" if plan.kind == "inline" else "num_devices=2"
        return [*JOB, *own, where, *self._also]

    def reference(self, plan: Plan) -> Victim:
        """The same job, undisturbed. (How often it saves makes a difference to its figures if
        weights come to a generator of its own roughly.)"""
        key = plan.kind == "inline", plan.every
        if key not in self._references:
            name = "-".join(["undisturbed", *map(str, key)])
            victim = Victim(self._folder / name, *self.settings(plan))
            assert victim.finish() == 0, victim.output
            self._references[key] = victim
        return self._references[key]

    def round(self, number: int, plan: Plan) -> tuple[list[str], float | None]:
        """Runs a job and kills; what is wrong afterwards, and the seconds from the first kill to
        the end of the next step."""
        reference, before = self.reference(plan), shared_memory()
        with _cluster(plan.kind) as cluster:
            settings, environment = self.settings(plan), None
            if cluster:
                settings.append(f"ray.address={cluster[0].cluster}")
                environment = netlab.RAY_ENVIRONMENT
            victim = Victim(
                self._folder / f"round-{number}",
                *settings,
                relay=plan.kind == "relay",
                environment=environment,
            )
            try:
                killed = _disturb(victim, plan, cluster)
                faults = _faults(victim, reference, plan, killed)
            finally:
                for process in victim.processes():
                    process.kill()
            if left := _left_in_shared_memory(before):
                faults.append(f"in shared memory: {left}")
        return faults, None if killed is None else victim.seconds_to_next_step(killed)


@contextmanager
def _cluster(kind: str) -> Iterator[list[netlab.Node]]:
    """Two nodes of one device each, where a node is to be killed."""
    if kind != "node":
        yield []
        return
    with netlab.ray_nodes(nodes=2, cpus=1) as nodes:
        yield nodes


def _disturb(victim: Victim, plan: Plan, cluster: list[netlab.Node]) -> float | None:
    """Kills at the planned moment; when, by the monotonic clock, or None if the job was done."""
    waits = victim.wait_for_save if plan.in_save else victim.wait_for_step
    if not waits(plan.step + plan.in_save):
        return None
    if not plan.in_save:
        time.sleep(plan.pause)
    killed = time.monotonic()
    _kill(victim, plan, cluster)
    if plan.again_after is not None and victim.runs:
        time.sleep(plan.again_after)
        _kill(victim, plan, cluster)
    return killed


def _kill(victim: Victim, plan: Plan, cluster: list[netlab.Node]) -> None:
    if plan.kind == "node":
        cluster[1].fail()
        netlab._start_node(cluster[1], 1, False, {})
    elif plan.kind in ("driver", "inline"):
        victim.kill("driver")
        victim.start()
    else:
        victim.kill(plan.kind, plan.number)


def _faults(victim: Victim, reference: Victim, plan: Plan, killed: float | None) -> list[str]:
    """What is wrong with a job that should have finished."""
    faults: list[str] = []
    if (code := victim.finish()) != 0:
        return [f"exit code {code}: {victim.output[-1500:]}"]
    if killed is None:
        faults.append("it was over before it could be disturbed")
    if victim.rows() != reference.rows():
        faults.append("its figures are others")
    mine, other = victim.model(), reference.model()
    if not all(mine[name].equal(tensor) for name, tensor in other.items()):
        faults.append("its weights are others")
    for row in victim.recoveries():
        if row["after_step"] - row["from_step"] > 2 * plan.every:  # one may be being written
            faults.append(f"{row['after_step'] - row['from_step']} steps were repeated")
    if unfinished := victim.steps_under_way():
        faults.append(f"unfinished checkpoints: {unfinished}")
    if left := victim.left_after(SECONDS_TO_END):
        faults.append(f"still there: {left}")
    return faults


def _left_in_shared_memory(before: set[str]) -> set[str]:
    """What has come and does not go; other programs come and go, too."""
    until = time.monotonic() + SECONDS_TO_END
    left = shared_memory() - before
    while left and time.monotonic() < until:
        time.sleep(0.5)
        left &= shared_memory()
    return left


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the rounds; what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of all jobs besides")
    chosen = parser.parse_args(arguments)
    draw, kinds = random.Random(chosen.seed), chosen.kinds.split(",")
    good, seconds = 0, []
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        chaos = Chaos(Path(folder), chosen.settings)
        for number in range(chosen.rounds):
            plan = Plan.drawn(kinds[number % len(kinds)], draw)
            faults, took = chaos.round(number, plan)
            good += not faults
            seconds += [] if took is None else [took]
            shown = "-" if took is None else f"{took:5.1f} s"
            print(
                f"{number + 1:3} {plan.kind:7} {shown:>8}  {'ok ' if not faults else 'BAD'} {plan}",
                *(f"    {fault}" for fault in faults),
                sep="\n",
                flush=True,
            )
    result = {
        "name": "chaos",
        "rounds": chosen.rounds,
        "ok": good,
        "seed": chosen.seed,
        "median_seconds_to_next_step": round(statistics.median(seconds), 1) if seconds else None,
        "most_seconds_to_next_step": round(max(seconds), 1) if seconds else None,
    }
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    found = main()
    sys.exit(0 if found["ok"] == found["rounds"] else 1)

"""Kills and stops any process of short jobs at random moments, and looks how they end.

python tests/chaos_endings.py [--rounds 100] [--seed 0] [--kinds driver,host,...]

Where `chaos.py` has jobs with checkpoints, which go on, these have none: what cannot go on ends. A
round is `ok` if that takes no longer than 30 s (after a stop: the deadline and 15 s), if one
sentence names what was lost, if nothing is left, no process and nothing in shared memory, and if
what is in the run's folder is whole. Prints a line for each round and a JSON line at last.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from chaos import _left_in_shared_memory
from safetensors import safe_open
from victims import PATTERNS, Victim, shared_memory

from hybridrl.run_files.run_status import read_run_status

DEADLINE, TO_KILLED, TO_STOPPED, TO_END = 10, 30.0, 15.0, 240.0
"""Seconds: of a call; from a kill to the end; beyond the deadline after a stop; of a whole job."""
JOB = [
    *("rollout=transformers", "devices=cpu", "num_devices=2", "trainer.steps=30"),
    *("model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "eval.prompts=8"),
    *("warmup.steps=1", "eval.every=10", "observe.samples_every=1", "reward.timeout_s=4"),
    *(f"controller.timeout_s={DEADLINE}", "controller.heartbeat_s=3"),
]
REWARD = """
from hybridrl.sandbox.python_runner import run_python

def runs(prompt, response, **row):
    return float(run_python("print(1)").stdout == "1\\n")
"""
GOES_ON = ""
ENDINGS = {
    ("kill", "driver"): None,  # nobody is left to say anything
    ("stop", "driver"): GOES_ON,  # after a while it is let go on
    ("kill", "host"): r"rank \d \(process {pid} on \S+\) died during",
    ("stop", "host"): r"did not finish within .*process {pid} on \S+, which does not answer",
    ("kill", "relay"): r"The relay, .* died",
    ("stop", "relay"): r"The relay, .* did not answer",
    ("kill", "reward"): GOES_ON,
    ("stop", "reward"): r"longer than `reward\.timeout_s`",
    ("kill", "supervisor"): r"The process that watches over a sandboxed program died",
    ("stop", "supervisor"): None,
    ("kill", "raylet"): r"Ray's raylet \(.*process {pid}\) ended",
    ("stop", "raylet"): r"Ray's raylet \(.*process {pid}\) is stopped",
    ("kill", "gcs"): r"Ray's gcs_server \(.*process {pid}\) ended",
    ("stop", "gcs"): GOES_ON,
}
"""What the error says; None: anything."""


class Round(NamedTuple):
    """What is done in one."""

    act: str
    kind: str
    step: int
    pause: float
    number: int

    def __str__(self) -> str:
        return f"{self.act} {self.kind}, {self.pause:.2f} s after step {self.step}"


def play(folder: Path, drawn: Round) -> tuple[list[str], float]:
    """Runs a job and does it; what is wrong then, and the seconds to its end."""
    before = shared_memory()
    settings = [*JOB, f"reward.function={folder.parent}/own.py:runs"]
    victim = Victim(folder, *settings, relay=drawn.kind == "relay")
    try:
        if not victim.wait_for_step(drawn.step):
            return [f"it ended before: {victim.output[-800:]}"], 0.0
        time.sleep(drawn.pause)
        begin, pid = time.monotonic(), _strike(victim, drawn)
        limit = TO_KILLED if drawn.act == "kill" else DEADLINE + TO_STOPPED
        ending = ENDINGS[drawn.act, drawn.kind]
        try:
            victim.process.wait(TO_END if ending in (GOES_ON, None) else limit + 20)
        except subprocess.TimeoutExpired:
            return [f"it hangs: {victim.output[-1500:]}"], time.monotonic() - begin
        seconds = time.monotonic() - begin
        victim.finish()
        faults = list(_faults(victim, drawn, pid))
        if ending and seconds > limit:
            faults.append(f"its end took {seconds:.0f} s")
        if left := victim.left_after(30):
            faults.append(f"still there: {left}")
    finally:
        for process in victim.processes():
            process.kill()
    if left_in_memory := _left_in_shared_memory(before):
        faults.append(f"in shared memory: {left_in_memory}")
    return faults, seconds


def _strike(victim: Victim, drawn: Round) -> int:
    found = _processes(victim, drawn.kind)
    until = time.monotonic() + 20
    while not found and victim.runs and time.monotonic() < until:  # supervisors come and go
        found = _processes(victim, drawn.kind)
    if not found:
        return 0
    process = found[drawn.number % len(found)]
    try:
        process.send_signal(signal.SIGKILL if drawn.act == "kill" else signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return 0
    if (drawn.act, drawn.kind) == ("stop", "driver"):
        time.sleep(5)
        process.resume()
    return process.pid


def _processes(victim: Victim, kind: str) -> list[psutil.Process]:
    if kind == "driver":
        return [psutil.Process(victim.process.pid)]
    if kind != "supervisor":
        return victim.processes(PATTERNS[kind])
    found = []
    for child in victim.processes(PATTERNS["reward"]):
        try:
            found += child.children()
        except psutil.NoSuchProcess:
            continue
    return found


def _faults(victim: Victim, drawn: Round, pid: int) -> list[str]:
    faults = []
    ending, code = ENDINGS[drawn.act, drawn.kind], victim.process.returncode
    errors = re.findall(r"^error: .*$", victim.output, re.MULTILINE)
    state, why = read_run_status(victim.run)
    expected = {0: "finished", 1: "failed", -9: "killed"}.get(code, "")
    if "Ray has ended the driver with it" in victim.output:
        expected = "killed"
    if state != expected:
        faults.append(f"exit code {code} and the state {state} ({why})")
    if code == 0 and ending and pid:
        faults.append("it went on as if nothing had been")
    if ending == GOES_ON and code != 0:
        faults.append(f"exit code {code}: {victim.output[-1500:]}")
    if code == 1 and len(errors) != 1:
        faults.append(f"{len(errors)} errors: {victim.output[-1500:]}")
    said = victim.output.partition("\nerror: ")[2]
    if code == 1 and ending and not re.search(ending.format(pid=pid), said):
        faults.append(f"it says of process {pid}: {said[:1500]}")
    if re.search(r"^Traceback", victim.output, re.MULTILINE) and drawn.kind != "supervisor":
        faults.append(f"a traceback: {victim.output[-1500:]}")
    for line in (
        (victim.run / "metrics.jsonl").read_text().splitlines()[: None if code >= 0 else -1]
    ):
        json.loads(line)
    if (model := victim.run / "model").exists():
        with safe_open(model / "model.safetensors", "pt") as weights:
            assert list(weights.keys()) and (model / "tokenizer.json").is_file()
    return faults


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Plays the rounds; what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(dict.fromkeys(kind for _, kind in ENDINGS)))
    chosen = parser.parse_args(arguments)
    draw, good = random.Random(chosen.seed), 0
    kinds = chosen.kinds.split(",")
    cases = [case for case in ENDINGS if case[1] in kinds]
    with tempfile.TemporaryDirectory(prefix="endings") as folder:
        (Path(folder) / "own.py").write_text(REWARD)
        for number in range(chosen.rounds):
            act, kind = cases[number % len(cases)]
            drawn = Round(act, kind, draw.randrange(12), draw.random(), draw.randrange(2))
            faults, seconds = play(Path(folder) / f"round-{number}", drawn)
            good += not faults
            said = "ok " if not faults else "BAD"
            print(
                f"{number + 1:3} {seconds:6.1f} s  {said} {drawn}",
                *(f"    {fault}" for fault in faults),
                sep="\n",
                flush=True,
            )
    result = {"name": "chaos_endings", "rounds": chosen.rounds, "ok": good, "seed": chosen.seed}
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    found = main()
    sys.exit(0 if found["ok"] == found["rounds"] else 1)

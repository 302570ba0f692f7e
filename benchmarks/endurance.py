"""Whether memory stays flat over a long run: the main program over Ray, with a model so small that
2,000 steps take minutes.

    python benchmarks/endurance.py [--steps 2000]

Resident memory of the driver, of its hosts and of Ray's own processes, and what lies in the object
store, are looked at after every `EVERY` steps. A figure is the growth in bytes per step over the
second half of the run, by a straight line through it; the baseline is 1 KiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from figures import report

EVERY = 50
JOB = [
    *("model.tiny.hidden_size=32", "model.tiny.layers=1", "model.tiny.heads=1"),
    *("warmup.steps=0", "rollout=transformers", "rollout.max_tokens=2", "num_devices=2"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "eval.every=0"),
    *("eval.prompts=4", "algorithm=ppo", "algorithm.kl_coefficient=0.1"),
    *("observe.samples_every=0", "observe.show_every=0"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    run = Path(tempfile.mkdtemp(prefix="endurance-")) / "run"
    command = [sys.executable, "-m", "hybridrl.main", *JOB, f"run.directory={run}"]
    process = subprocess.Popen(
        [*command, f"trainer.steps={options.steps}"], stdout=subprocess.DEVNULL
    )
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    next_look = EVERY
    while process.poll() is None:
        time.sleep(0.5)
        step = steps_of(run / "metrics.jsonl")
        if step >= next_look:
            next_look = step + EVERY
            print(f"# step {step}")
            for name, size in memory_of(psutil.Process(process.pid)).items():
                seen[name].append((step, size))
    if process.returncode:
        sys.exit(process.returncode)
    for name, points in sorted(seen.items()):
        steps, sizes = np.array(points[len(points) // 2 :], dtype=float).T
        slope = float(np.polyfit(steps, sizes, 1)[0])
        print(f"{name}: {sizes[0] / 2**20:.1f} to {sizes[-1] / 2**20:.1f} MiB", file=sys.stderr)
        report(f"growth of {name}, bytes a step", slope, 1024.0, "<= 1.0", "bytes")


def steps_of(file: Path) -> int:
    """The last step whose metrics are written."""
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def memory_of(driver: psutil.Process) -> dict[str, int]:
    """Bytes of the driver, its hosts and Ray's processes, and of all objects in shared memory."""
    found = {"driver": driver.memory_info().rss, "store": 0}
    for child in driver.children(recursive=True):
        try:
            name, shared = " ".join(child.cmdline()), child.memory_info()
        except psutil.Error:  # it has just ended
            continue
        kind = "host" if "RayHost" in name else "raylet" if "raylet/raylet" in name else ""
        if kind == "raylet":  # holds the store, whose pages are shared
            found["store"] = shared.shared
        if kind:
            kind = f"{kind} {sum(other.startswith(kind) for other in found)}"
            found[kind] = shared.rss - shared.shared
    return found


if __name__ == "__main__":
    main()

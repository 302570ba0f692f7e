"""What faults cost a job: a worker is killed every so often while it trains.

python benchmarks/recovery.py [--minutes 10] [--fault-every 120]

Effective time is the share of the job's time, from its first step, that was neither spent without
workers nor on steps that were made again. Ends the job by SIGTERM, and prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from figures import report
from victims import Victim

from hybridrl.errors import EXIT_PREEMPTED

JOB = [
    *("rollout=transformers", "devices=cpu", "num_devices=2", "trainer.steps=1000000"),
    *("warmup.steps=2", "eval.every=0", "resume=auto", "checkpoint.every=10"),
]
GRACE_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--fault-every", type=float, default=120.0, help="seconds")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery") as folder:
        victim = Victim(Path(folder) / "job", *JOB)
        victim.wait_for_step(1)
        begin, kills = time.monotonic(), []
        while (left := begin + 60 * chosen.minutes - time.monotonic()) > chosen.fault_every:
            time.sleep(min(left, chosen.fault_every))
            kills.append(time.monotonic())
            print(f"# kill {len(kills)}")
            victim.kill("host", len(kills))
        time.sleep(max(0.0, begin + 60 * chosen.minutes - time.monotonic()))
        victim.process.send_signal(signal.SIGTERM)
        code, asked = victim.process.wait(GRACE_SECONDS), time.monotonic()
        seconds = asked - begin
        summary = json.loads((victim.run / "summary.json").read_text())
        assert code == EXIT_PREEMPTED and summary["recoveries"] == len(kills), victim.output
        next_steps = [took for kill in kills if (took := victim.seconds_to_next_step(kill))]
    print(f"# {len(kills)} faults, {summary['steps']} steps in {seconds:.0f} s")
    report("effective time", seconds - summary["seconds_lost"], seconds, ">= 0.8", "s")
    if next_steps:
        print(f"# the longest way from a kill to the next step: {max(next_steps):.1f} s")
        median = statistics.median(next_steps)
        report("from the kill to the next step, against 40 s", median, 40.0, "<= 1", "s")


if __name__ == "__main__":
    main()

"""Whether the rank that keeps the others waiting is named, and how long after the deadline.

    python benchmarks/hangs.py [--rounds 10]

Three ranks meet in collectives. In each round another one of them is frozen there, is in an endless
reward function, or waits for a lock that it has itself; the executor is a new one each time.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "integration"))

from figures import report
from stray_ranks import PRELOAD, go_astray

RANKS, LIMIT, GOAL_SECONDS = 3, 8.0, 15.0
WAYS = ("frozen", "endless", "deadlock")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    from hybridrl.ray_backend.connection import start_local_cluster
    from hybridrl.ray_backend.ray_executor import RayExecutor

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for the hosts
    start_local_cluster(RANKS)
    for way in WAYS:
        right, slowest = 0, 0.0
        for number in range(rounds):
            missing = number % RANKS
            executor = RayExecutor("cpu", RANKS, timeout_s=LIMIT, preload=PRELOAD)
            text, named, seconds = go_astray(executor, RANKS, way, missing)
            right += named in text and seconds - LIMIT <= GOAL_SECONDS
            slowest = max(slowest, seconds - LIMIT)
            if named not in text:
                print(text.partition("\n")[0])
        print(f"# the slowest took {slowest:.1f} s")
        report(f"{way} rank named", right, rounds, ">= 1.0", "rounds")


if __name__ == "__main__":
    main()

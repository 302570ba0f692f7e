"""Whether the rank that keeps the others waiting is named, and how long after the deadline.

    python benchmarks/hangs.py [--rounds 10]

Three ranks meet in collectives. In each round another one of them is frozen there, is in an endless
reward function, or waits for a lock that it has itself; the executor is a new one each time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import threading
import time

import torch

from hybridrl.controller import ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.errors import CallTimeoutError

RANKS, LIMIT, GOAL_SECONDS = 3, 5.0, 15.0
WAYS = ("frozen", "endless", "deadlock")


class Peers(Worker):
    """Ranks of which one goes astray."""

    def __init__(self, context) -> None:  # type: ignore[no-untyped-def]
        from hybridrl.parallel.process_group import join

        super().__init__(context)
        join(context)

    @transfer(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @transfer(ONE_TO_ALL)
    def meet(self, way: str, missing: int) -> None:
        for number in range(20):
            torch.distributed.all_reduce(torch.ones(8))
            if self.context.rank == missing and number == 10:
                getattr(self, way)()

    def frozen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def endless(self) -> None:
        def score() -> None:
            while True:
                pass

        score()

    def deadlock(self) -> None:
        lock = threading.Lock()
        with lock, lock:
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    from hybridrl.ray_backend.cluster import start
    from hybridrl.ray_backend.executor import RayExecutor

    start(RANKS)
    for way in WAYS:
        right, slowest = 0, 0.0
        for number in range(rounds):
            missing = number % RANKS
            begin = time.monotonic()
            try:
                with RayExecutor("cpu", RANKS, timeout_s=LIMIT) as executor:
                    peers = WorkerGroup(executor, "peers", Peers, range(RANKS)).ready()
                    pids = peers.process().get()
                    begin = time.monotonic()
                    peers.meet(way, missing).get()
            except CallTimeoutError as error:
                seconds = time.monotonic() - begin - LIMIT
                named = re.search(
                    r"rank that is missing: peers rank (\d) \(process (\d+)", str(error)
                )
                is_right = named and (int(named[1]), int(named[2])) == (missing, pids[missing])
                right += bool(is_right and seconds <= GOAL_SECONDS)
                slowest = max(slowest, seconds)
                if not is_right:
                    print(str(error).partition("\n")[0])
        figure = {"name": f"{way} rank named", "ratio": right / rounds, "goal": ">= 1.0"}
        print(json.dumps(figure | {"rounds": rounds, "slowest_s": round(slowest, 1)}), flush=True)


if __name__ == "__main__":
    main()

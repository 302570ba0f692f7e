"""What the driver's work costs as the job grows.

    python benchmarks/scaling.py

1. A step of GRPO's dataflow over 2 workers that compute next to nothing, with 64 and with 4,096
   samples: the driver's own processor time, and the memory that it holds.
2. An empty call to groups of 2, 8 and 32 workers on fractions of a core, and back: the driver's own
   processor time, and wall time. As 32 processes have to be woken on the cores that there are, wall
   time is also given beside that of Ray's own call to as many actors that do nothing.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import numpy as np
import psutil
import torch
from figures import SMOKE, report

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.controller import DP, ONE_TO_ALL, UPDATE, BatchRef, Worker, WorkerGroup, transfer
from hybridrl.ray_backend.ray_executor import RayExecutor
from hybridrl.ray_backend.ray_import import ray

PER_PROMPT, PROMPT, RESPONSE = 8, 16, 64
STEPS, ROUNDS, CALLS = 10, 15, 20
SAMPLES, WORKERS = (64, 4096), (2, 4) if SMOKE else (2, 8, 32)
CPUS_PER_WORKER = 0.05


class Synthetic(Worker):
    """Makes columns of the right shapes at once."""

    @transfer(DP)
    def generate_sequences(self, batch: Batch) -> Batch:
        lengths = torch.full((len(batch),), RESPONSE)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        size = int(cu_seqlens[-1])
        return Batch.from_columns(
            {
                "response_ids": RaggedColumn(torch.zeros(size, dtype=torch.long), cu_seqlens),
                "rollout_log_probs": RaggedColumn(torch.zeros(size), cu_seqlens),
            }
        )

    @transfer(DP)
    def compute_reward(self, batch: Batch) -> Batch:
        return Batch.from_columns({"scores": np.zeros(len(batch), dtype=np.float32)})

    @transfer(UPDATE)
    def update_actor(self, batch: Batch) -> dict[str, float]:
        return {"loss": float(len(batch))}

    @transfer(ONE_TO_ALL)
    def nothing(self) -> None:
        return None


@ray.remote(num_cpus=0)
class Bare:
    """What Ray itself costs."""

    def nothing(self) -> None:
        return None


def advantages(batch: Batch) -> Batch:
    return Batch.from_columns({"advantages": np.zeros(len(batch), dtype=np.float32)})


def prompts(number: int) -> Batch:
    cu_seqlens = torch.arange(number + 1) * PROMPT
    ids = RaggedColumn(torch.zeros(number * PROMPT, dtype=torch.long), cu_seqlens)
    return Batch.from_columns({"prompt_ids": ids, "group_id": np.arange(number)})


def step(executor: RayExecutor, actor: WorkerGroup, reward: WorkerGroup, batch: Batch) -> BatchRef:
    table = executor.put(batch).repeat(PER_PROMPT)
    table |= actor.generate_sequences(table)
    table |= reward.compute_reward(table)
    table |= table.apply(advantages, ["scores", "group_id"])
    actor.update_actor(table).get()
    executor.take_records()
    return table


def growth_with_samples() -> None:
    with RayExecutor("cpu", 2) as executor:
        groups = [WorkerGroup(executor, r, Synthetic, [0, 1]).ready() for r in ("actor", "reward")]
        batches = {n: prompts(n // PER_PROMPT) for n in SAMPLES}

        def seconds(samples: int) -> float:
            begin = time.process_time()
            for _ in range(STEPS):
                step(executor, *groups, batches[samples])
            return (time.process_time() - begin) / STEPS

        def held(samples: int) -> int:
            """The most bytes that Python objects and arrays of the driver took in a step."""
            gc.collect()
            tracemalloc.start()
            step(executor, *groups, batches[samples])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        def resident(samples: int) -> int:
            for _ in range(STEPS):
                step(executor, *groups, batches[samples])
            return psutil.Process().memory_info().rss

        few, many = SAMPLES
        seconds(few), seconds(many)
        times = [(seconds(many), seconds(few)) for _ in range(ROUNDS)]
        ours, baseline = (statistics.median(column) for column in zip(*times, strict=True))
        report(f"driver time of a step, {many} / {few} samples", ours, baseline, "<= 1.1", "s")
        before, after = resident(few), resident(many)
        report(f"driver memory, {many} / {few} samples", after, before, "<= 1.1", "bytes")
        report(
            f"driver objects of a step, {many} / {few} samples",
            held(many),
            held(few),
            "none",
            "bytes",
        )


def growth_with_workers() -> None:
    number = max(WORKERS)
    with RayExecutor("cpu", number, cpus_per_host=CPUS_PER_WORKER) as executor:
        groups = {
            n: WorkerGroup(executor, f"workers{n}", Synthetic, list(range(n))).ready()
            for n in WORKERS
        }

        def cost(workers: int) -> tuple[float, float]:
            """Processor seconds of the driver, and wall seconds, by call."""
            wall, own = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                groups[workers].nothing().get()
            executor.take_records()
            return (time.process_time() - own) / CALLS, (time.perf_counter() - wall) / CALLS

        bare = [Bare.remote() for _ in range(number)]

        def bare_cost() -> float:
            begin = time.perf_counter()
            for _ in range(CALLS):
                ray.get([actor.nothing.remote() for actor in bare])
            return (time.perf_counter() - begin) / CALLS

        for n in WORKERS:
            cost(n)
        bare_cost()
        measured = {n: [] for n in WORKERS}
        of_bare = []
        for _ in range(ROUNDS):
            for n in WORKERS:
                measured[n].append(cost(n))
            of_bare.append(bare_cost())
        for index, what in enumerate(("driver time", "wall time")):
            medians = {n: statistics.median(m[index] for m in measured[n]) for n in WORKERS}
            for n in WORKERS[1:]:
                goal = "<= 2.0" if n == number else "none"
                report(
                    f"{what} of a call, {n} / {WORKERS[0]} workers",
                    medians[n],
                    medians[WORKERS[0]],
                    goal,
                    "s",
                )
        ours = statistics.median(wall for _, wall in measured[number])
        baseline = statistics.median(of_bare)
        report(f"wall time of a call to {number} workers, of Ray's", ours, baseline, "<= 1.2", "s")


if __name__ == "__main__":
    growth_with_samples()
    growth_with_workers()

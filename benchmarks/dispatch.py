"""What a group call costs, against bare Ray actors on the same machine.

    python benchmarks/dispatch.py

1. An empty call to two workers and back.
2. 64 MiB of ragged columns to two workers, every byte read; bare Ray sends numpy halves.
3. The same 64 MiB, beside what others do: padded to the longest row, pickled, and sent whole to
   both workers.
4. The same batch handed from one group to another: bytes that the driver received and sent.
"""

from __future__ import annotations

import pickle
import time

import numpy as np
import psutil
from figures import interleave, report

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.controller import DP, ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.ray_backend.ray_executor import RayExecutor, ray

MIB = 1 << 20
ROWS, CALLS, ROUNDS = 4096, 50, 9


class Reader(Worker):
    @transfer(ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @transfer(DP)
    def read(self, batch: Batch) -> Batch:
        total = sum(int(batch[name].values.sum()) for name in batch.columns)
        return Batch.from_columns({"total": np.full(len(batch), total)})

    @transfer(DP)
    def make(self, batch: Batch) -> Batch:
        return Batch.from_columns({f"made_{name}": batch[name] for name in batch.columns})


@ray.remote(num_cpus=0)
class Bare:
    def nothing(self) -> None:
        return None

    def read(self, arrays: dict[str, np.ndarray]) -> int:
        return sum(int(array.sum()) for array in arrays.values())

    def read_pickled(self, message: bytes) -> int:
        tensors = pickle.loads(message)
        return sum(int(tensor.sum()) for tensor in tensors.values())


def ragged_batch() -> Batch:
    """64 MiB in two int64 columns of equal row lengths on average, unevenly long."""
    import torch

    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2 * 4 * MIB // ROWS, ROWS)
    lengths = (lengths * (4 * MIB / lengths.sum())).astype(np.int64)
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    size = int(cu_seqlens[-1])
    columns = {}
    for name in ("prompt_ids", "response_ids"):
        values = torch.from_numpy(generator.integers(0, 1000, size))
        columns[name] = RaggedColumn(values, cu_seqlens)
    return Batch.from_columns(columns)


def timed(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def loopback_bytes() -> int:
    """What all processes here have sent each other so far: no less than the driver's own."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


def main() -> None:
    with RayExecutor("cpu", 2) as executor:
        group = WorkerGroup(executor, "reader", Reader, [0, 1]).ready()
        other = WorkerGroup(executor, "other", Reader, [0, 1]).ready()
        bare = [Bare.remote() for _ in range(2)]

        def ours_call() -> float:
            return timed(lambda: [group.nothing().get() for _ in range(CALLS)]) / CALLS

        def bare_call() -> float:
            def calls() -> None:
                for _ in range(CALLS):
                    ray.get([actor.nothing.remote() for actor in bare])

            return timed(calls) / CALLS

        ours_call(), bare_call()
        ours, baseline = interleave(ours_call, bare_call, ROUNDS)
        report("call to 2 workers and back", ours, baseline, "<= 1.15", "s")

        batch = ragged_batch()
        arrays = {name: batch[name].values.numpy() for name in batch.columns}
        half = len(arrays["prompt_ids"]) // 2

        def ours_read() -> float:
            return timed(lambda: group.read(batch).collect(["total"]))

        def bare_read() -> float:
            def read() -> None:
                halves = [{k: v[:half] for k, v in arrays.items()}]
                halves.append({k: v[half:] for k, v in arrays.items()})
                references = [ray.put(part) for part in halves]
                calls = zip(bare, references, strict=True)
                ray.get([actor.read.remote(part) for actor, part in calls])

            return timed(read)

        ours_read(), bare_read()
        ours, baseline = interleave(ours_read, bare_read, ROUNDS)
        name = f"{batch.nbytes / MIB:.0f} MiB ragged to 2 workers, every byte read"
        report(name, ours, baseline, "<= 1.2", "s")

        def padded_read() -> float:
            def read() -> None:
                tensors = {name: batch.padded(name)[0] for name in batch.columns}
                message = ray.put(pickle.dumps(tensors))
                ray.get([actor.read_pickled.remote(message) for actor in bare])

            return timed(read)

        padded_read()
        ours, baseline = interleave(ours_read, padded_read, 3)
        report(f"{name}, of padded and pickled", ours, baseline, "<= 0.2", "s")

        made = group.make(batch)
        executor.settle()
        before = loopback_bytes()
        renamed = made.select("made_prompt_ids", "made_response_ids")
        other.read(renamed).collect(["total"])
        moved = loopback_bytes() - before
        report(
            "bytes through the driver from group to group", moved, batch.nbytes, "< 0.01", "bytes"
        )


if __name__ == "__main__":
    main()

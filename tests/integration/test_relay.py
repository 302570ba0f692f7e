"""Group calls that reach many hosts through the relay: results, order, failures, memory."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from hybridrl.batch.batch import Batch
from hybridrl.controller import DP, FIRST_RANK, ONE_TO_ALL, Worker, WorkerGroup, transfer
from hybridrl.errors import CallTimeoutError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MANY, FEW, CPUS = 10, 3, 0.05
ROWS = 2 * MANY


class Tiny(Worker):
    order: list[tuple[str, int]] = []  # noqa: RUF012  of all roles of the host process

    @transfer(DP)
    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns({"y": np.asarray(batch["x"]) * 2})

    @transfer(DP)
    def add(self, batch: Batch, more: int) -> Batch:
        return Batch.from_columns({"z": np.asarray(batch["x"]) + np.asarray(batch["y"]) + more})

    @transfer(DP)
    def fill(self, batch: Batch) -> Batch:
        """A quarter of a megabyte by rank: too much to travel with the reply."""
        return Batch.from_columns({"y": np.asarray(batch["x"]), "big": _big(len(batch))})

    @transfer(DP)
    def measure(self, batch: Batch) -> Batch:
        return Batch.from_columns({"bytes": np.full(len(batch), batch.nbytes)})

    @transfer(ONE_TO_ALL)
    def mark(self, number: int) -> None:
        self.order.append((self.context.role, number))

    @transfer(ONE_TO_ALL)
    def marks(self) -> list[tuple[str, int]]:
        return list(self.order)

    @transfer(ONE_TO_ALL)
    def processes(self) -> int:
        return os.getpid()

    @transfer(FIRST_RANK)
    def peer(self) -> list[int]:
        return [self.context.rank, self.context.world_size]

    @transfer(ONE_TO_ALL)
    def sleep(self, rank: int, seconds: float) -> int:
        if self.context.rank == rank:
            time.sleep(seconds)
        return self.context.rank

    @transfer(ONE_TO_ALL)
    def fail(self) -> None:
        if self.context.rank == 1:
            raise ValueError("no such luck")


def _big(rows: int) -> list[np.ndarray]:
    return [np.zeros(1 << 14) for _ in range(rows)]


def numbers(rows: int = ROWS) -> Batch:
    return Batch.from_columns({"x": np.arange(rows)})


@pytest.fixture(scope="module")
def many(ray):
    from hybridrl.ray_backend.ray_executor import RayExecutor

    with RayExecutor("cpu", MANY, cpus_per_host=CPUS, timeout_s=100) as executor:
        yield executor


@pytest.fixture(scope="module")
def groups(many):
    """Two on all hosts; two more that overlap them and each other."""
    devices = {"a": range(MANY), "b": range(MANY), "c": range(6), "d": range(4, MANY)}
    return {
        role: WorkerGroup(many, role, Tiny, list(chosen)).ready()
        for role, chosen in devices.items()
    }


@pytest.fixture
def few(ray, monkeypatch):
    """Starts executors of few hosts that use the relay nevertheless, with one group each."""
    from hybridrl.ray_backend.ray_executor import RayExecutor

    monkeypatch.setattr("hybridrl.ray_backend.ray_executor.MAX_DIRECT_HOSTS", 0)
    started = []

    def start(timeout_s: float = 100.0) -> WorkerGroup:
        started.append(RayExecutor("cpu", FEW, cpus_per_host=CPUS, timeout_s=timeout_s))
        return WorkerGroup(started[-1], "tiny", Tiny, list(range(FEW))).ready()

    yield start
    for executor in started:
        executor.close()


def relay_process() -> psutil.Process:
    """The relay that was started last. Process numbers start again when they run out."""
    found = [
        child
        for child in psutil.Process().children(recursive=True)
        if "ray::CallRelay" in " ".join(child.cmdline())
    ]
    return max(found, key=psutil.Process.create_time)


def test_calls_and_batches_from_group_to_group(many, groups):
    table = many.put(numbers())
    table |= groups["a"].double(table)
    table |= groups["b"].add(table, 1)
    table |= table.apply(lambda batch: Batch.from_columns({"w": np.asarray(batch["z"]) * 10}), "z")
    assert len(table) == ROWS
    found = table.collect(["x", "z", "w"])
    assert np.asarray(found["z"]).tolist() == [3 * x + 1 for x in range(ROWS)]
    assert np.asarray(found["w"]).tolist() == [30 * x + 10 for x in range(ROWS)]
    twice = groups["c"].double(table.take([3, 1]).repeat(2)).collect()
    assert np.asarray(twice["y"]).tolist() == [6, 6, 2, 2]
    assert groups["d"].peer().get() == [0, MANY - 4]
    assert len(set(groups["a"].processes().get())) == MANY


@pytest.mark.more
def test_records_belong_to_steps(many, groups):
    many.take_records()
    groups["c"].mark(0)
    first = many.end_step()
    handle = groups["d"].mark(0)
    assert {record.role for record in many.take_records(first)} == {"c"}
    handle.get()
    records = many.take_records()
    assert [(record.role, record.rank) for record in records] == [("d", r) for r in range(MANY - 4)]
    assert many.take_records() == []


@pytest.mark.more
def test_every_host_keeps_the_order_of_the_driver(groups):
    start = [len(marks) for marks in groups["a"].marks().get()]
    made = []
    for number in range(40):
        for role in ("a", "c", "d", "b", "d", "c")[: 2 + number % 5]:
            groups[role].mark(number)
            made.append((role, number))
    on = {role: set(group.devices) for role, group in groups.items()}
    for host, marks in enumerate(groups["a"].marks().get()):
        assert marks[start[host] :] == [call for call in made if host in on[call[0]]]


@pytest.mark.more
def test_an_interrupted_wait_loses_nothing(groups):
    handle = groups["a"].sleep(2, 3.0)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        handle.get()
    begin = time.monotonic()
    assert groups["c"].peer().get() == [0, 6]
    assert handle.get() == list(range(MANY))
    assert time.monotonic() - begin < 5


@pytest.mark.more
def test_waiting_for_some_time_only(groups):
    handle = groups["a"].sleep(MANY - 1, 1.0)
    assert not handle.done_within(0.2)
    assert handle.done_within(None)


@pytest.mark.more
def test_memory_does_not_grow_with_the_calls(ray, many, groups):
    def stored() -> int:
        """Objects in shared memory."""
        from ray._private.internal_api import memory_summary

        address = ray.get_runtime_context().gcs_address
        summary = memory_summary(address, stats_only=True)
        return int(re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)[1])

    def step() -> None:
        table = many.put(numbers())
        table |= groups["a"].fill(table)
        groups["b"].measure(table).collect()
        many.take_records()

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            step()
        groups["a"].peer().get()  # carries the news of what is not needed any more
        time.sleep(1)
        return stored(), relay_process().memory_info().rss

    objects, resident = steps(10)
    later, grown = steps(40)
    assert later <= objects + MANY
    assert grown < resident + (20 << 20)


@pytest.mark.more
def test_an_exception_is_told_with_its_traceback(few):
    with pytest.raises(WorkerError, match=r"tiny\.fail failed on rank 1: .*no such luck") as caught:
        few().fail().get()
    assert 'raise ValueError("no such luck")' in str(caught.value)


@pytest.mark.more
def test_a_killed_host_is_named(few):
    tiny = few()
    victim = tiny.processes().get()[1]
    handle = tiny.sleep(2, 60.0)
    again = tiny.sleep(1, 60.0)
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"^tiny rank 1 \(process {victim} on .*died during tiny"
    ):
        handle.get()
    assert time.monotonic() - begin < 50  # the other call takes 60
    with pytest.raises(WorkerError, match="has failed before"):
        again.get()


@pytest.mark.more
def test_a_hanging_host_is_named_with_all_stacks(few):
    tiny = few(timeout_s=20.0)  # the relay, too, has to have started within it
    with pytest.raises(CallTimeoutError, match=r"tiny\.sleep on rank 1 did not finish") as caught:
        tiny.sleep(1, 60.0).get()
    assert "time.sleep(seconds)" in str(caught.value)


@pytest.mark.more
def test_a_relay_that_died_unnoticed_lets_the_job_end(few):
    few()
    relay_process().kill()  # the executor is closed when the test is over


@pytest.mark.more
def test_a_killed_relay_is_a_sentence(few):
    tiny = few()
    handle = tiny.sleep(1, 60.0)
    relay_process().kill()
    with pytest.raises(WorkerError, match=r"^The relay, .* died"):
        handle.get()

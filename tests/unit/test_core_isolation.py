"""Cores of their own for stages that work beside each other (`resources=auto`)."""

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from hybridrl.batch.call_record import CallRecord
from hybridrl.run.watchers import core_isolation
from hybridrl.run.watchers.core_isolation import WINDOW, CoreIsolation
from hybridrl.run.watchers.watcher import FinishedStep
from hybridrl.system.core_allocation import allocate_cores, divide_cores
from hybridrl.system.core_pins import CorePins, HostCores

USABLE = os.sched_getaffinity(0)


def slowest(curves, numbers):
    return max(curve[n - 1] for curve, n in zip(curves.values(), numbers, strict=True))


@pytest.mark.parametrize("seed", range(100))
def test_no_allocation_is_quicker_than_the_one_that_is_found(seed):
    draw = random.Random(seed)
    cores, stages = draw.randint(1, 7), draw.randint(1, 4)
    curves = {}
    for stage in range(stages):  # measured curves need not fall
        least, most = sorted(draw.choices(range(1, cores + 1), k=2))
        curves[stage] = [
            draw.choice([1.0, 2.0, draw.random()]) if least <= n <= most else math.inf
            for n in range(1, cores + 1)
        ]
    tried = [
        numbers
        for numbers in itertools.product(range(1, cores + 1), repeat=stages)
        if sum(numbers) <= cores and slowest(curves, numbers) < math.inf
    ]
    found = allocate_cores(curves, cores)
    if not tried:
        assert found is None
        return
    assert sum(found.values()) <= cores
    assert slowest(curves, found.values()) == min(slowest(curves, one) for one in tried)


def test_cores_are_divided_and_shared():
    assert divide_cores([4, 5, 6, 7, 9], 2) == [[4, 5], [6, 7, 9]]
    assert divide_cores([4, 5], 3) == [[4], [5], [4]]
    assert divide_cores([3], 1) == [[3]]


class Executor:
    """Hosts that are told their cores, and the steps that they take with them."""

    def __init__(self, hosts=1, cores=8, threads=1, nodes=1):
        addresses = [str(host * nodes // hosts) for host in range(hosts)]
        self.cluster = SimpleNamespace(devices=[SimpleNamespace(node=a) for a in addresses])
        self.told = []
        self._cores = HostCores(frozenset(range(cores)), threads)

    def assign_cores(self, pins):
        self.told.append(pins)
        return [self._cores for _ in pins]


def steps_of(watcher, number, seconds, **load):
    """What the watcher says of steps that take this long, and whose hosts have this load."""
    said = []
    for _ in range(number):
        records = []
        for host in range(len(watcher._devices)):
            record = CallRecord("actor", host, "generate_sequences", host=host)
            record.loads = {"generate": {k.replace("_", " "): v for k, v in load.items()}}
            records.append(record)
        step = FinishedStep(1, None, records, [], {"time/step": seconds})
        said += watcher.on_step_end(step)
    return said


CROWDED = {"wall": 4.0, "queued": 3.0, "workers": 1.0, "reward_processes": 12.0}


def test_stages_are_pinned_where_steps_become_quicker():
    executor = Executor()
    watcher = CoreIsolation(executor)
    (said,) = steps_of(watcher, WINDOW + 1, 5.0, **CROWDED)
    # The workers need one core-second and would not wait; 12 core-seconds on 7 cores are 1.71 s.
    assert "reward processes 7" in said and "workers 1" in said and "1.71 s" in said
    pinned = {"generate": {"workers": [7], "reward processes": list(range(7))}}
    assert executor.told[-1] == [pinned] or executor.told[-1] == [
        {"generate": {"workers": [0], "reward processes": list(range(1, 8))}}
    ]
    (said,) = steps_of(watcher, WINDOW + 1, 4.0, **CROWDED)
    assert "4.00 s" in said and "5.00 s" in said and "kept" in said
    told = len(executor.told)
    assert steps_of(watcher, 3 * (WINDOW + 1), 4.0, **CROWDED) == []
    assert len(executor.told) == told  # nothing has changed


def test_what_wins_nothing_is_taken_back():
    executor = Executor()
    watcher = CoreIsolation(executor)
    steps_of(watcher, WINDOW + 1, 5.0, **CROWDED)
    (said,) = steps_of(watcher, WINDOW + 1, 5.1, **CROWDED)
    assert "nothing is pinned" in said and "5.10 s" in said
    assert executor.told[-1] == [{}]
    assert steps_of(watcher, 3 * (WINDOW + 1), 5.0, **CROWDED) == []


def test_another_mix_is_solved_anew():
    executor = Executor()
    watcher = CoreIsolation(executor)
    steps_of(watcher, WINDOW + 1, 5.0, **CROWDED)
    steps_of(watcher, WINDOW + 1, 4.0, **CROWDED)
    light = {**CROWDED, "workers": 3.0, "reward_processes": 4.0}
    assert steps_of(watcher, WINDOW + 1, 3.0, **light) == []  # only the pins are gone
    assert executor.told[-1] == [{}]
    (said,) = steps_of(watcher, WINDOW + 1, 3.0, **light)
    assert "This is tried" in said


@pytest.mark.parametrize(
    ("cores", "threads", "load", "why"),
    [
        (1, 1, CROWDED, "too few"),
        (4, 4, CROWDED, "too few"),  # a core for each thread leaves none
        (2, 1, {**CROWDED, "workers": 2.0, "reward_processes": 6.0}, "slowest would take 6.00 s"),
        (8, 1, {"wall": 4.0, "queued": 0.1, "workers": 4.0}, "take 0.00 core-seconds"),
        (8, 1, {**CROWDED, "reward_processes": 0.1}, "take 0.10 core-seconds"),
        (8, 1, {}, "no step was measured"),
    ],
)
def test_where_nothing_can_be_won_it_says_why(cores, threads, load, why):
    executor = Executor(cores=cores, threads=threads)
    (said,) = steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **load)
    assert why in said and "Nothing is pinned" in said
    assert not any(pins for told in executor.told for pins in told)


def test_a_quota_gives_no_cores(monkeypatch):
    monkeypatch.setattr(core_isolation, "read_core_quota", lambda: 1.5)
    executor = Executor()
    (said,) = steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **CROWDED)
    assert "quota" in said and "Nothing is pinned" in said


def test_hosts_of_a_node_share_its_cores_and_nodes_do_not():
    executor = Executor(hosts=4, cores=8, nodes=2)
    steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **CROWDED)
    pins = [one["generate"] for one in executor.told[-1]]
    assert pins[:2] == pins[2:]
    of_node = [core for one in pins[:2] for part in one.values() for core in part]
    assert set(of_node) == set(range(8))
    assert pins[0]["workers"] == pins[1]["workers"]  # one core is enough for both
    first, second = (set(one["reward processes"]) for one in pins[:2])
    assert not first & second and not (first | second) & set(pins[0]["workers"])


BURNS = "import time\nprint(flush=True)\nwhile True: pass"


@pytest.fixture
def pool():
    """A pool of a process that burns a core, and a child of it that does."""
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURNS!r}]); {BURNS}"
    child = child.replace("; import", "\nimport")
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline(), process.stdout.readline()

    class Pool:
        name, pids = "reward processes", [process.pid]

    yield Pool()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_threads_and_descendants_are_pinned_as_long_as_a_phase(pool):
    core = min(USABLE)
    pins, ended = CorePins(), threading.Event()
    pins.pools.add(pool)
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert pins.assign({"generate": {"workers": [core], pool.name: [core]}}).usable == USABLE
    load = {}
    with pins.phase("train", {}):
        assert os.sched_getaffinity(thread.native_id) == USABLE
    with pins.phase("generate", load):
        found = [thread.native_id, os.getpid(), *pins._pids(pool.name)]
        assert len(found) == 4
        assert {frozenset(os.sched_getaffinity(one)) for one in found} == {frozenset({core})}
        burnt = pins._read()[pool.name]
        while pins._read()[pool.name] < burnt + 0.05:
            time.sleep(0.02)
    assert {frozenset(os.sched_getaffinity(one)) for one in found} == {frozenset(USABLE)}
    assert load["wall"] >= 0.02 and load[pool.name] >= 0.05
    ended.set()
    thread.join()


def test_affinity_comes_back_after_an_error_and_is_what_it_was(pool):
    core = min(USABLE)
    os.sched_setaffinity(pool.pids[0], {core})  # of its own
    pins = CorePins()
    pins.pools.add(pool)
    pins.assign({"generate": {pool.name: sorted(USABLE)}})
    with pytest.raises(KeyError), pins.phase("generate", {}):
        raise KeyError
    assert os.sched_getaffinity(pool.pids[0]) == {core}


def test_processes_come_and_go_in_a_phase(pool):
    core, other = min(USABLE), max(USABLE)
    pins, first = CorePins(), pool.pids[0]
    pins.pools.add(pool)
    pins.assign({"generate": {"workers": [other], pool.name: [core]}})
    with pins.phase("generate", {}):
        late = subprocess.Popen(["sleep", "60"])
        assert os.sched_getaffinity(late.pid) == {other}  # as the worker that starts it
        assert late.pid in pins._pids("workers") and first not in pins._pids("workers")
        type(pool).pids = [late.pid, 2**22 + 1]  # one is gone
        pins.pin_child(pool.name, late.pid)
        assert os.sched_getaffinity(late.pid) == {core}
    assert os.sched_getaffinity(late.pid) == USABLE
    type(pool).pids = [first]
    late.kill()
    late.wait()


def test_what_a_worker_starts_in_a_phase_is_free_after_it():
    pins = CorePins()
    pins.assign({"generate": {"workers": [min(USABLE)]}})
    with pins.phase("generate", {}):
        own = subprocess.Popen(["sleep", "60"])
        assert os.sched_getaffinity(own.pid) == {min(USABLE)}
    assert os.sched_getaffinity(own.pid) == USABLE
    own.kill()
    own.wait()


def test_nothing_is_measured_nor_pinned_without_being_asked_for():
    pins, load = CorePins(), {}
    with pins.phase("generate", load):
        pass
    assert load == {}

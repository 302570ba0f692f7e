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
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.batch.call_record import CallRecord
from hybridrl.controller.worker import Worker, WorkerContext
from hybridrl.processes.supervised_process import ProcessSpec, SupervisedProcess
from hybridrl.run.watchers.core_isolation import WINDOW, CoreIsolation, allocate_cores
from hybridrl.run.watchers.watcher import FinishedStep
from hybridrl.system import core_pins
from hybridrl.system.core_pins import PINS, CorePins

USABLE = os.sched_getaffinity(0)


def slowest(curves, numbers):
    return max(curve[n - 1] for curve, n in zip(curves.values(), numbers, strict=True))


@settings(max_examples=100)
@given(st.integers(0, 10_000))
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


class Executor:
    """Hosts that are told their cores, and the steps that they take with them."""

    def __init__(self, hosts=1, cores=8, nodes=1):
        addresses = [str(host * nodes // hosts) for host in range(hosts)]
        self.cluster = SimpleNamespace(devices=[SimpleNamespace(node=a) for a in addresses])
        self.told = []
        self._cores = frozenset(range(cores))

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
            named = {k.replace("_", " "): v for k, v in load.items()}
            record.loads = {"generate": named} if named else {}
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
    # The workers have the first core, because nothing else may use it.
    assert executor.told[-1] == [{"generate": {"reward processes": set(range(1, 8))}}]
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


def test_what_was_tried_in_vain_is_not_tried_again_because_pins_had_moved_work():
    executor = Executor()
    watcher = CoreIsolation(executor)
    steps_of(watcher, WINDOW + 1, 5.0, **CROWDED)
    moved = {**CROWDED, "workers": 4.0, "reward_processes": 4.0}  # the rest runs after the phase
    (said,) = steps_of(watcher, WINDOW + 1, 5.1, **moved)
    assert "nothing is pinned" in said
    assert steps_of(watcher, 3 * (WINDOW + 1), 5.0, **CROWDED) == []


def test_a_step_is_judged_by_what_a_token_takes():
    watcher = CoreIsolation(Executor())
    for seconds, tokens in ((5.0, 100.0), (8.0, 200.0)):  # longer responses
        for _ in range(WINDOW + 1):
            record = CallRecord("actor", 0, "generate_sequences", host=0)
            record.loads = {"generate": {k.replace("_", " "): v for k, v in CROWDED.items()}}
            metrics = {"time/step": seconds, "response/tokens": tokens}
            said = list(watcher.on_step_end(FinishedStep(1, None, [record], [], metrics)))
    assert "8.00 s" in said[0] and "10.00 s" in said[0] and "kept" in said[0]


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
    ("cores", "load", "why"),
    [
        (0, CROWDED, "quota"),
        (1, CROWDED, "too few"),
        (2, {**CROWDED, "environment_processes": 3.0}, "too few"),
        (2, {**CROWDED, "workers": 2.0, "reward_processes": 6.0}, "slowest would take 6.00 s"),
        # The workers hardly waited for a core.
        (8, {**CROWDED, "queued": 0.1}, "slowest would take 3.90 s"),
        (8, {"wall": 4.0, "queued": 0.1, "workers": 4.0}, "slowest would take 4.00 s"),
        # They waited, but not because of these.
        (8, {**CROWDED, "reward_processes": 0.1}, "slowest would take 3.90 s"),
        (8, {}, "no step was measured"),
    ],
)
def test_where_nothing_can_be_won_it_says_why(cores, load, why):
    executor = Executor(cores=cores)
    (said,) = steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **load)
    assert why in said and "Nothing is pinned" in said
    assert not any(pins for told in executor.told for pins in told)


def test_a_pool_without_work_needs_no_core():
    executor = Executor(cores=2)
    load = {**CROWDED, "workers": 1.0, "reward_processes": 1.0, "environment_processes": 0.01}
    (said,) = steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **load)
    assert "tried" in said and executor.told[-1] == [{"generate": {"reward processes": {1}}}]


@pytest.mark.parametrize(
    ("quota", "usable"), [(len(USABLE) - 0.5, set()), (len(USABLE), USABLE), (None, USABLE)]
)
def test_a_quota_gives_no_cores(monkeypatch, quota, usable):
    monkeypatch.setattr(core_pins, "read_core_quota", lambda: quota)
    assert CorePins().assign({}) == usable


def test_hosts_of_a_node_share_its_cores_and_nodes_do_not():
    executor = Executor(hosts=4, cores=8, nodes=2)
    steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **CROWDED)
    # 24 core-seconds on 7 cores are 3.43 s.
    assert executor.told[-1] == 4 * [{"generate": {"reward processes": set(range(1, 8))}}]


def test_a_host_that_does_not_answer_is_no_reason_to_pin():
    executor = Executor()
    executor.assign_cores = lambda pins: []
    (said,) = steps_of(CoreIsolation(executor), WINDOW + 1, 5.0, **CROWDED)
    assert "Nothing is pinned" in said


POOL = "reward processes"
BURNS = "import time\nprint(flush=True)\nwhile True: pass"


@pytest.fixture
def process():
    """A process that burns a core, and a child of it that does."""
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURNS!r}]); {BURNS}"
    child = child.replace("; import", "\nimport")
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True
    )
    process.stdout.readline(), process.stdout.readline()
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def affinities(pins):
    return [frozenset(os.sched_getaffinity(pid)) for _, pid in pins._list_processes()]


def test_pools_are_pinned_as_long_as_a_phase_and_workers_are_not(process):
    core, loads = min(USABLE), {}
    pins, ended = CorePins(), threading.Event()
    pins.add_child(POOL, process)
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert pins.assign({"generate": {POOL: frozenset({core})}}) == USABLE
    with pins.phase("train", {}):
        assert affinities(pins) == [USABLE, USABLE]
    with pins.phase("generate", loads):
        assert affinities(pins) == [{core}, {core}]
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == USABLE
        burnt = pins._read_seconds()[POOL]
        while pins._read_seconds()[POOL] < burnt + 0.05:
            time.sleep(0.02)
    assert affinities(pins) == [USABLE, USABLE]
    load = loads["generate"]
    assert load["wall"] >= 0.02 and load[POOL] >= 0.05 and 0 <= load["queued"] <= load["wall"]
    ended.set()
    thread.join()


def test_affinity_comes_back_after_an_error_and_is_what_it_was(process):
    pins, core = CorePins(), min(USABLE)
    pins.add_child(POOL, process)
    _, (_, child) = pins._list_processes()
    os.sched_setaffinity(child, {core})  # of its own
    pins.assign({"generate": {POOL: USABLE - {core}}})
    with pytest.raises(KeyError), pins.phase("generate", {}):
        assert affinities(pins) == [USABLE - {core} or USABLE, {core}]
        raise KeyError
    assert affinities(pins) == [USABLE, {core}]


def test_processes_come_and_go_in_a_phase(process):
    core = min(USABLE)
    pins = CorePins()
    pins.add_child(POOL, process)
    pins.add_child(POOL, 2**22 + 1)  # one is gone
    pins.assign({"generate": {POOL: frozenset({core})}})
    with pins.phase("generate", {}):
        late = subprocess.Popen(["sleep", "60"])
        assert os.sched_getaffinity(late.pid) == USABLE  # a worker's own
        pins.add_child(POOL, late.pid)
        assert os.sched_getaffinity(late.pid) == {core}
    assert os.sched_getaffinity(late.pid) == USABLE
    late.kill()
    late.wait()


def test_what_pools_start_while_pins_end_is_free_too(process, monkeypatch):
    pins, core, late = CorePins(), min(USABLE), []
    pins.add_child(POOL, process)
    pins.assign({"generate": {POOL: frozenset({core})}})
    with pins.phase("generate", {}):
        listed = pins._list_processes

        def start_after():  # a program of the pool, after it was listed
            found = listed()
            if not late:
                late.append(subprocess.Popen(["taskset", "-c", str(core), "sleep", "60"]))
                while os.sched_getaffinity(late[0].pid) != {core}:
                    time.sleep(0.01)
                pins.pools[late[0].pid] = POOL
            return found

        monkeypatch.setattr(pins, "_list_processes", start_after)
    assert os.sched_getaffinity(late[0].pid) == USABLE
    late[0].kill()
    late[0].wait()


def test_the_longest_wait_of_a_thread_counts(monkeypatch):
    pins, loads = CorePins(), {}
    pins.assign({})
    waits = iter([{1: 5.0, 2: 7.0}, {1: 5.001, 2: 7.002, 3: 0.001}, {1: 5.0}, {1: 9.0}])
    monkeypatch.setattr(core_pins, "_read_queues", lambda: next(waits))
    with pins.phase("generate", loads):
        time.sleep(0.01)
    assert loads["generate"]["queued"] == pytest.approx(0.002)
    with pins.phase("score", loads):
        pass
    assert loads["score"]["queued"] == loads["score"]["wall"]


def test_phases_of_a_call_add_up():
    pins, loads = CorePins(), {}
    pins.assign({})
    for _ in range(2):
        with pins.phase("sync", loads):
            time.sleep(0.01)
    assert 0.02 <= loads["sync"]["wall"] < 1


def test_nothing_is_measured_nor_pinned_without_being_asked_for(process):
    pins, loads = CorePins(), {}
    pins.add_child(POOL, process)
    pins.assign({"generate": {POOL: frozenset({min(USABLE)})}})
    pins.assign(None)  # the job is over
    with pins.phase("generate", loads):
        assert affinities(pins) == [USABLE, USABLE]
    assert loads == {}


def test_a_supervised_process_is_of_its_pool_while_it_lives():
    spec = ProcessSpec("reward process", [sys.executable, "-c", ""], None, {}, repr, repr)
    spec = spec._replace(dumps=lambda message: b"", loads=lambda data: None)
    before = dict(PINS.pools)
    process = SupervisedProcess(spec)
    assert PINS.pools == {**before, process._process.pid: "reward processes"}
    process.close()
    assert PINS.pools == before


def test_a_phase_of_a_worker_is_measured_but_not_beside_another():
    PINS.assign({})
    for is_beside, phases in ((False, {"score"}), (True, set())):
        worker = Worker(WorkerContext("reward", 0, 1))
        worker.is_beside = is_beside
        with worker.phase("score"):
            pass
        assert worker.record.loads.keys() == phases
    PINS.assign(None)

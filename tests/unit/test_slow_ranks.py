"""Devices that are named as slow, and those that are not."""

import numpy as np
import pytest
from tiers import few_of
from watching import finished, watched

from hybridrl.batch.call_record import CallRecord
from hybridrl.run.watchers.slow_devices import SlowDeviceWatcher, compute_slowdowns
from hybridrl.system.cluster_spec import ClusterSpec


def record(rank, seconds, tokens=100, waited=0.0, role="actor", method="update", stage=0):
    found = CallRecord(role, rank, method, start=10.0, end=10.0 + seconds + (waited or 0.0))
    found.tokens, found.waited, found.stage = tokens, waited, stage
    return found


def watch(steps, devices=4, roles=("actor",)):
    """The metrics, and what is said, after each of these steps: lists of records."""
    places = {role: list(range(devices)) for role in roles}
    slow = SlowDeviceWatcher(places, ClusterSpec.of_one_node("cpu", devices).devices)
    found = [finished(5, step) for step in steps]
    said = [watched(slow, step) for step in found]
    return [(step.metrics, sentences) for step, sentences in zip(found, said, strict=True)]


@pytest.mark.parametrize("devices", [2, 3, 4, 16])
def test_a_device_that_takes_twice_as_long_is_named_once(devices):
    def step(number):
        rng = np.random.default_rng(number)
        return [
            record(rank, rng.uniform(0.9, 1.1) * (2 if rank == 1 else 1)) for rank in range(devices)
        ]

    said = [said for _, said in watch(map(step, range(20)), devices)]
    assert [len(sentences) for sentences in said] == [0, 0, 0, 0, 1, *[0] * 15]
    assert said[4][0].startswith("step 5: device 1 on localhost (actor rank 1) takes ")


@pytest.mark.parametrize("devices", few_of([2, 3, 4, 16], [2, 3, 4]))
def test_noise_is_not_named(devices):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        steps = [
            [record(rank, rng.lognormal(0, 0.15)) for rank in range(devices)] for _ in range(50)
        ]
        assert not any(said for _, said in watch(steps, devices))


def test_who_is_slow_now_and_then_is_not_named():
    steps = [
        [record(rank, 3.0 if rank == number % 4 else 1.0) for rank in range(4)]
        for number in range(24)
    ]
    assert not any(said for _, said in watch(steps))


def test_waiting_for_the_slow_one_is_not_work():
    """As all ranks of an update end it at the same time."""
    steps = [[record(rank, 1.0, waited=1.0) for rank in range(3)] + [record(3, 2.0)]] * 6
    figures, said = watch(steps)[4]
    assert figures == {"time/slowest_ratio": 2.0}
    assert "device 3" in said[0] and "2.0 times" in said[0]


def test_more_tokens_may_take_longer():
    records = [record(0, 4.0, tokens=400), record(1, 1.0), record(2, 1.0)]
    assert compute_slowdowns(records, {"actor": [0, 1, 2]}) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_only_peers_are_compared():
    records = [
        *(record(rank, 1.0, stage=0) for rank in (0, 1)),
        *(record(rank, 9.0, stage=1) for rank in (2, 3)),
        *(record(rank, 5.0, role="critic") for rank in (0, 1)),
        *(record(rank, 7.0, method="generate") for rank in (2, 3)),
    ]
    places = {"actor": [0, 1, 2, 3], "critic": [0, 1]}
    assert compute_slowdowns(records, places) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}


def test_what_cannot_be_judged_is_left_out():
    records = [
        *(record(rank, 0.001 * (1 + rank)) for rank in (0, 1)),  # too short
        record(2, 1.0, tokens=0),  # no work
        record(3, 1.0, waited=None),  # nobody knows how much of it was waiting
        record(0, 1.0, role="judge"),  # alone
        record(-1, 1.0),  # of no worker
        record(0, 1.0, role="driver"),
    ]
    assert compute_slowdowns(records, {"actor": [0, 1, 2, 3], "judge": [0]}) == {}
    assert watch([records])[0] == ({}, [])


def test_all_that_a_device_does_counts_together():
    """A short call that is slow makes no slow device."""
    records = []
    for rank in range(4):
        records.append(record(rank, 1.0))
        records.append(record(rank, 0.1 * (3 if rank == 2 else 1), role="reward"))
    found = compute_slowdowns(records, {"actor": range(4), "reward": range(4)})
    assert found[2] == pytest.approx(1.3 / 1.1) and found[1] == 1.0

"""How the probe measures; what it finds is for benchmarks/plan.py."""

from types import SimpleNamespace

import pytest
import torch

from hybridrl.system import timing

CPU = torch.device("cpu")


class Clock:
    """Time that passes only in the runs, and which of them were made."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def run(self, name, seconds):
        def once():
            self.calls.append(name)
            self.now += seconds(len(self.calls))

        return once


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_what_disturbs_the_machine_for_a_moment_hits_no_run_alone(clock):
    def disturbed(usual):
        return lambda number: 50.0 if number in (5, 6) else usual  # of four turns, the third

    runs = [clock.run("a", disturbed(1.0)), clock.run("b", disturbed(2.0))]
    assert timing.measure_seconds(runs, CPU, turns=3, least=0.0) == [1.0, 2.0]
    assert clock.calls == ["a", "b"] * 4  # once to warm up


def test_a_quick_run_is_repeated(clock):
    runs = [clock.run("quick", lambda _: 1.0), clock.run("slow", lambda _: 9.0)]
    assert timing.measure_seconds(runs, CPU, turns=3, least=12.0) == [1.0, 9.0]
    assert clock.calls == ["quick", "slow"] + (["quick"] * 4 + ["slow"]) * 3

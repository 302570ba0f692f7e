"""How the probe measures; what it finds is for benchmarks/plan.py."""

import time

import torch

from hybridrl.planner.probe import _timed

CPU = torch.device("cpu")


def test_what_disturbs_the_machine_for_a_moment_hits_no_run_alone():
    calls = []

    def run(name):
        def once():
            calls.append(name)
            time.sleep(0.05 if len(calls) in (5, 6) else 0.001)  # of four turns, the third

        return once

    first, second = _timed([run("a"), run("b")], CPU, 1, turns=3, least=0.0)
    assert calls == ["a", "b"] * 4  # once to warm up
    assert first < 0.02 and second < 0.02


def test_a_quick_run_is_repeated():
    calls = []
    _timed([lambda: calls.append(1)], CPU, 1, turns=3, least=0.01)
    assert len(calls) > 5

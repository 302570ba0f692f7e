"""All predictions about this machine rest on one measurement, and say which and how old it is."""

import itertools
import json
import time

import pytest

from hybridrl.cli import main
from hybridrl.planner.machine import cluster_rates, measurements
from hybridrl.planner.machine.measurements import LAYERS

JOB = ["devices=cpu", "num_devices=2", "rollout=transformers", "placement=flattening", "--json"]


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """A machine that seems slower each time it is measured; gives how often it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times = itertools.count(1)

    def measure(*job):
        slow = float(next(times))
        found = dict.fromkeys(("forward", "training", "memory", "link", "network"), 1e9 / slow)
        overheads = {"forward_overhead": 1e-4 * slow, "training_overhead": 3e-4 * slow}
        return {**found, **overheads, "sums": 1.0, "small_op": 1e-5 * slow}

    monkeypatch.setattr(cluster_rates, "mean_of_all", measure)
    return times


def printed(capsys, *options):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *JOB, *options])
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    return json.loads(captured.out)


@pytest.mark.more
def test_a_plan_and_a_search_give_one_answer_for_one_placement(busy, capsys):
    plan, again = (
        printed(
            capsys,
        ),
        printed(capsys),
    )
    found = printed(capsys, "--search")
    assert next(busy) == 2  # it was measured once
    assert again["time"]["step"] == plan["time"]["step"]
    everywhere = {role: place["devices"] for role, place in plan["roles"].items()}
    (same,) = [
        one
        for one in found["best"]
        if {role: place["devices"] for role, place in one["roles"].items()} == everywhere
        and one["settings"].items() <= plan["settings"].items()
    ]
    assert same["step_seconds"] == pytest.approx(plan["time"]["step"], rel=1e-12)
    assert "measured just now at a load of" in again["time"]["source"]
    assert any("measured just now" in reason for reason in found["reasons"])


@pytest.mark.more
def test_what_was_measured_long_ago_is_measured_anew(busy, capsys, monkeypatch):
    before = printed(capsys)["time"]
    day = time.time() + 86400.0
    monkeypatch.setattr(measurements.time, "time", lambda: day)
    later = printed(capsys)["time"]
    assert "measured 24 h 0 min ago" in later["source"] and later["step"] == before["step"]
    week = day + measurements.FRESH_S
    monkeypatch.setattr(measurements.time, "time", lambda: week)
    assert printed(capsys)["time"]["step"] > before["step"]


def test_measurements_are_one_file_that_may_be_cut_short(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    about = {"number": 2}
    assert measurements.find_measurement(LAYERS, about) is None
    for forward in (1.0, 2.0):
        kept = measurements.begin_measurement(LAYERS, about)
        file = measurements.keep_measurement(
            measurements.Measurement(LAYERS, about, {"forward": forward}, kept.date, kept.load)
        )
    assert measurements.find_measurement(LAYERS, about).data == {"forward": 2.0}
    assert measurements.find_measurement(LAYERS, {"number": 1}) is None
    assert len(json.loads(file.read_text())["measurements"]) == 1
    file.rename(file.with_name("other.json"))
    (other,) = measurements.other_machines(LAYERS)
    assert other.data == {"forward": 2.0}
    file.write_text(file.with_name("other.json").read_text()[:50])
    assert measurements.find_measurement(LAYERS, about) is None

"""The timeline: what stands on which device, when it is idle, and the files."""

from __future__ import annotations

import json

import pytest

from hybridrl.batch.call_record import Record
from hybridrl.console.timeline import bars_of, draw_timeline, idle_shares, trace_events

BEGIN = 1_700_000_000.0
DEVICES = {"actor": [0, 1], "reference": [2]}


def call(role, rank, method, start, end, **phases):
    return Record(role, rank, method, BEGIN + start, BEGIN + end, phases)


RECORDS = [
    call("actor", 0, "generate_sequences", 0, 2, generate=1.5, sync=0.2),
    call("actor", 1, "generate_sequences", 0, 1, generate=1.0),
    call("reference", 0, "compute_ref_log_prob", 2, 3, score=1.0),
    call("actor", 0, "update_actor", 3, 4, train=0.3),
    call("actor", 1, "update_actor", 3, 4, train=1.0),
    call("driver", 0, "advantages", 2.5, 2.6),
]


def test_bars_stand_on_the_devices_of_their_roles():
    bars = bars_of(RECORDS, DEVICES)
    assert [(b.device, b.role, b.start, b.end) for b in bars] == [
        (0, "actor", 0, 2),
        (1, "actor", 0, 1),
        (2, "reference", 2, 3),
        (0, "actor", 3, 4),
        (1, "actor", 3, 4),
    ]
    assert [bar.phase for bar in bars] == ["generate", "generate", "score", "other", "train"]


def test_idle_is_what_no_call_covers():
    assert idle_shares(bars_of(RECORDS, DEVICES)) == pytest.approx({0: 0.25, 1: 0.5, 2: 0.75})


def test_overlapping_calls_are_counted_once():
    records = [
        call("actor", 0, "a", 0, 3),
        call("actor", 0, "b", 1, 2),
        call("actor", 0, "c", 2, 4),
    ]
    assert idle_shares(bars_of(records, DEVICES)) == pytest.approx({0: 0.0})


def test_the_trace_is_in_microseconds():
    events = trace_events(bars_of(RECORDS, DEVICES))
    (event,) = [e for e in events if e["name"] == "reference.compute_ref_log_prob"]
    assert (event["ph"], event["pid"], event["ts"], event["dur"]) == ("X", 2, 2_000_000, 1_000_000)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["device 0", "device 1", "device 2"]


@pytest.mark.parametrize("records", [RECORDS, []])
def test_both_files_are_written(tmp_path, records):
    draw_timeline(records, DEVICES, tmp_path / "timeline.png", "step 2")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "traceEvents" in json.loads((tmp_path / "timeline.json").read_text())

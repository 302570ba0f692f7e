"""What devices did and waited for, from recorded steps; the trace; the commands that show both."""

import json

import pytest

from hybridrl import cli
from hybridrl.batch.call_record import CallRecord, PhaseSpan
from hybridrl.report.device_spans import read_device_spans, sum_idle_by_cause
from hybridrl.report.perfetto_trace import write_perfetto_trace
from hybridrl.run_files.recorded_steps import RecordedStep, append_recorded_step

BEGIN = 1_700_000_000.0


def call(number, role, rank, host, phase, start, end, *, reads=(), waited=0.0, method="m"):
    record = CallRecord(role, rank, method, BEGIN + start, BEGIN + end)
    record.spans = [PhaseSpan(phase, record.start, record.end, waited)]
    record.phases[phase] = end - start
    record.call, record.host, record.reads = number, host, reads
    record.waited, record.tokens = waited, 100
    return record


def two_pools(number, at, call_at, ahead=0.0):
    """A generator on device 1, whose clock is ahead, and an actor of one rank on device 0."""
    return RecordedStep(
        number,
        BEGIN + at,
        BEGIN + at + 6,
        [
            call(call_at, "generator", 0, 1, "generate", at + 1 + ahead, at + 3 + ahead),
            call(call_at + 1, "reward", 0, 1, "score", at + 3 + ahead, at + 3.5 + ahead),
            call(
                *(call_at + 2, "actor", 0, 0, "score", at + 3, at + 4),
                reads=(call_at,),
                method="compute_log_prob",
            ),
            call(call_at + 3, "actor", 0, 0, "train", at + 4, at + 6, reads=(call_at + 1,)),
        ],
        {1: ahead},
        driver=[PhaseSpan("data", BEGIN + at + 0.2, BEGIN + at + 0.9)],
    )


@pytest.fixture
def folder(tmp_path):
    """Two steps, and an evaluation of a second between them."""
    second = two_pools(2, 7.0, 20, ahead=0.5)
    evaluated = call(15, "generator", 0, 1, "generate", 6.7, 7.4)
    evaluation = PhaseSpan("evaluation", BEGIN + 6.1, BEGIN + 7.0)
    second = second._replace(between=[evaluated], driver=[evaluation, *second.driver])
    for step in (two_pools(1, 0.0, 10, ahead=0.5), second):
        append_recorded_step(tmp_path, step)
    return tmp_path


def told(spans, device):
    return [
        (
            round(span.start, 3),
            round(span.end, 3),
            span.cause if span.phase == "idle" else span.phase,
        )
        for span in spans
        if span.device == device
    ]


def test_every_moment_of_a_device_has_a_span_and_a_cause(folder):
    spans = read_device_spans(folder)
    assert told(spans, 0) == [
        (0.0, 0.2, "driver"),
        (0.2, 0.9, "data"),
        (0.9, 1.0, "driver"),
        (1.0, 3.0, "generator.generate"),
        (3.0, 4.0, "log-prob"),
        (4.0, 6.0, "update"),
        (6.0, 6.1, "driver"),
        (6.1, 7.0, "evaluation"),
        (7.0, 7.2, "driver"),
        (7.2, 7.9, "data"),
        (7.9, 8.0, "driver"),
        (8.0, 10.0, "generator.generate"),
        (10.0, 11.0, "log-prob"),
        (11.0, 13.0, "update"),
    ]
    assert told(spans, 1)[3:9] == [
        (1.0, 3.0, "generate"),
        (3.0, 3.5, "score"),
        (3.5, 4.0, "actor.log-prob"),
        (4.0, 6.0, "actor.update"),
        (6.0, 6.1, "driver"),
        (6.1, 6.2, "evaluation"),
    ]
    assert told(spans, 1)[-1] == (10.5, 13.0, "nothing to do")


def test_what_an_evaluation_calls_says_so(folder):
    (evaluated,) = [s for s in read_device_spans(folder) if s.phase == "generate" and s.cause]
    assert (evaluated.cause, evaluated.start, evaluated.step) == (
        *("evaluation", pytest.approx(6.2, abs=1e-4), 2),
    )


def test_only_the_last_steps_may_be_asked_for(folder):
    spans = read_device_spans(folder, last=1)
    assert {span.step for span in spans} == {2}
    assert min(span.start for span in spans) == pytest.approx(7.0, abs=1e-4)


def test_ranks_that_end_together_waited_for_the_slower_one(tmp_path):
    records = [
        call(1, "actor", rank, rank, "train", 0.0, 2.0, waited=waited)
        for rank, waited in enumerate((1.2, 0.2))
    ]
    append_recorded_step(tmp_path, RecordedStep(1, BEGIN, BEGIN + 2, records, {}))
    spans = read_device_spans(tmp_path)
    assert told(spans, 0) == [(0.0, 1.0, "update"), (1.0, 2.0, "peers")]
    assert told(spans, 1) == [(0.0, 2.0, "update")]
    assert sum_idle_by_cause(spans) == {0: {"peers": pytest.approx(0.5)}, 1: {}}


def test_a_device_without_calls_has_nothing_to_do(tmp_path):
    records = [call(1, "actor", 0, 0, "train", 0.0, 2.0)]
    append_recorded_step(tmp_path, RecordedStep(1, BEGIN, BEGIN + 2, records, {}))
    (tmp_path / "placement.json").write_text('{"roles": {"actor": {"devices": [0, 1]}}}')
    assert sum_idle_by_cause(read_device_spans(tmp_path))[1] == {
        "nothing to do": pytest.approx(1.0)
    }


def test_the_trace_is_as_its_format_has_it(folder, tmp_path):
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    spans = read_device_spans(folder)
    write_perfetto_trace(spans, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    named, ends = set(), {}
    for event in sorted(trace["traceEvents"], key=lambda e: e.get("ts", -1)):
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named |= {(event["pid"], event["tid"])} if "tid" in event else set()
            continue
        assert event["ph"] == "X" and isinstance(event["cat"], str)
        at = event["pid"], event["tid"]
        assert at in named
        assert isinstance(event["ts"], int) and event["dur"] >= 0
        assert event["ts"] >= ends.get(at, 0), "slices of a row overlap"
        ends[at] = event["ts"] + event["dur"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] in (0, 1)]
    assert len(slices) == len(spans)
    assert {e["name"] for e in slices} >= {"generate", "generate (evaluation)", "waiting for data"}


def test_the_command_writes_it_and_shows_why_devices_were_idle(folder, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["timeline", str(folder), "--steps", "2"])
    assert done.value.code == 0 and (folder / "trace.json").is_file()
    shown = capsys.readouterr().out
    assert "waiting for generator.generate 31%" in shown and "ui.perfetto.dev" in shown


def test_a_folder_without_steps_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["timeline", str(tmp_path)])
    assert done.value.code == 2
    assert "has no steps.jsonl" in " ".join(capsys.readouterr().err.split())

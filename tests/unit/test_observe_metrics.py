"""Metrics: lines that survive kills and full disks, trackers that are asked for by name."""

import json
import sys
import types

import numpy
import pytest
import torch

from hybridrl.errors import ConfigError, MissingPackageError, StorageError
from hybridrl.run_files.metric_reader import MetricReader, extract_series
from hybridrl.run_files.metric_writers import (
    JsonLinesWriter,
    TensorBoardWriter,
    open_metric_writers,
)
from hybridrl.run_files.run_directory import RunDirectory


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_sorted_object_per_line_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(1, {"b": 2.0, "a": 1, "step": 9})
    assert path.read_text() == '{"step": 1, "a": 1, "b": 2.0}\n'  # before any close
    writer.close()
    JsonLinesWriter(path).write(2, {"a": 3})
    assert [line["step"] for line in lines_of(path)] == [1, 2]


def test_what_json_lacks_is_null_and_numbers_of_other_libraries_are_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonLinesWriter(path).write(
        1,
        {
            "nan": float("nan"),
            "inf": -float("inf"),
            "numpy": numpy.float32(0.5),
            "torch": torch.tensor(2.0),
            "torch_nan": torch.tensor(float("nan")),
        },
    )
    assert lines_of(path) == [
        {"step": 1, "inf": None, "nan": None, "numpy": 0.5, "torch": 2.0, "torch_nan": None}
    ]


def test_a_full_disk_is_a_sentence_and_close_does_not_fail_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    writer = JsonLinesWriter(path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl.*disk is full.*`run\.root`"):
        writer.write(1, {"a": 1.0})
    writer.close()


def test_a_file_that_cannot_be_opened_is_a_sentence(tmp_path):
    with pytest.raises(StorageError, match="missing"):
        JsonLinesWriter(tmp_path / "missing" / "metrics.jsonl")


def test_a_line_cut_short_by_a_kill_spoils_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    JsonLinesWriter(path).write(2, {"a": 2.0})
    assert MetricReader(path).rows() == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_history_merges_a_step_and_drops_what_a_resume_makes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(0, {"accuracy": 0.5})
    for step in (1, 2, 3, 4):
        writer.write(step, {"reward/mean": step / 10, "nan": float("nan")})
    writer.write(2, {"accuracy": 0.6})  # late, and no reason to forget steps 3 and 4
    writer.write(2, {"reward/mean": 0.9})  # resumed from a checkpoint of step 1
    rows = MetricReader(path).rows()
    assert rows == [
        {"step": 0, "accuracy": 0.5},
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.9, "accuracy": 0.6},
    ]
    assert extract_series(rows, "accuracy") == ([0, 2], [0.5, 0.6])


def test_history_of_nothing_and_of_rubbish(tmp_path):
    assert MetricReader(tmp_path / "missing.jsonl").rows() == []
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"a": 1}\n{"step": "x"}\n\n{"step": 1, "t": "text"}\n')
    assert MetricReader(path).rows() == [{"step": 1}]


def test_history_leaves_out_numbers_beyond_a_float(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        f'{{"step": 1, "a": 1{"0" * 400}, "b": NaN, "c": 2}}\n{{"step": 1{"0" * 400}, "a": 1}}\n'
    )
    (row,) = MetricReader(tmp_path / "m.jsonl").rows()
    assert row.keys() == {"step", "b", "c"}


def test_tensorboard_for_real(tmp_path):
    run = RunDirectory.at(tmp_path)
    writers = open_metric_writers(["tensorboard", "jsonl"], run, "x", {})
    assert [type(writer) for writer in writers] == [JsonLinesWriter, TensorBoardWriter]
    for writer in writers:
        writer.write(1, {"reward/mean": 0.25})
        writer.write(2, {"reward/mean": float("nan")})
        writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert next((e.step, e.value) for e in events.Scalars("reward/mean")) == (1, 0.25)


@pytest.mark.parametrize("extra", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_a_missing_tracker_says_how_to_install_it(tmp_path, monkeypatch, extra):
    module = "torch.utils.tensorboard" if extra == "tensorboard" else extra
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"pip install '{extra}>="):
        open_metric_writers([extra], RunDirectory.at(tmp_path), "x", {})


def test_an_unknown_writer_names_the_nearest_and_opens_nothing(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean `tensorboard`"):
        open_metric_writers(["tensorbord"], RunDirectory.at(tmp_path), "x", {})
    assert not (tmp_path / "metrics.jsonl").exists()


class Tracker(types.ModuleType):
    """In the place of wandb, or mlflow: notes how its run was ended."""

    def __init__(self):
        super().__init__("tracker")
        self.ended = []

    def init(self, **_):
        return self

    def finish(self, exit_code):
        self.ended.append(exit_code)

    def end_run(self, status):
        self.ended.append(status)

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_trackio_gets_the_figures_of_each_step_and_no_run_is_begun_anew(tmp_path, monkeypatch):
    said = []

    class Stub(types.ModuleType):
        def init(self, **options):
            said.append(("init", options["name"], options["resume"], options["config"]))
            return self

        def log(self, metrics, step):
            said.append((step, metrics))

        def finish(self):
            said.append("finish")

    monkeypatch.setitem(sys.modules, "trackio", Stub("trackio"))
    for writer in open_metric_writers(["trackio"], RunDirectory.at(tmp_path), "mine", {"seed": 1}):
        writer.write(3, {"reward/mean": 0.5})
        writer.close("failed")
    expected = ("init", "mine", "allow", {"seed": 1}), (3, {"reward/mean": 0.5}), "finish"
    assert said == list(expected)


def test_metrics_are_read_as_they_grow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = MetricReader(path)
    assert growing.rows() == []
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    assert growing.rows() == [{"step": 1, "a": 1}]
    with path.open("a") as file:
        file.write(': 2}\n{"step": 2, "b": 3}')
    assert growing.rows() == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 3}]
    path.write_text('{"step": 1, "a": 9}\n{"step": 2, "a": 8, "longer": 1}\n{"step": 3}\n')
    assert growing.rows()[1] == {"step": 2, "a": 8, "longer": 1}  # another file under its name
    path.unlink()
    assert growing.rows() == []


@pytest.mark.parametrize(
    ("state", "wandb_code", "mlflow_status"),
    [("finished", 0, "FINISHED"), ("failed", 1, "FAILED"), ("interrupted", 1, "KILLED")],
)
def test_trackers_learn_how_a_run_has_ended(
    tmp_path, monkeypatch, state, wandb_code, mlflow_status
):
    for name, code in (("wandb", wandb_code), ("mlflow", mlflow_status)):
        tracker = Tracker()
        monkeypatch.setitem(sys.modules, name, tracker)
        for writer in open_metric_writers([name], RunDirectory.at(tmp_path), "x", {}):
            writer.close(state)
        assert tracker.ended == [code]

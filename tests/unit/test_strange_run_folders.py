"""Run folders that nobody's job has left so: links, pipes, devices, huge files, and text that
stands for more than it is. All that reads run folders says so, soon, or goes on without."""

import json
import os

import pytest
from run_folders import run_folder
from tiers import few_of

from hybridrl import cli
from hybridrl.composition.load import load_run_config
from hybridrl.errors import ConfigError, DataError
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.report.prometheus_metrics import render_prometheus_metrics
from hybridrl.report.report_content import ReportContent
from hybridrl.report.top_screen import render_top_screen
from hybridrl.run_files.metric_reader import MetricReader
from hybridrl.run_files.recorded_steps import read_recorded_steps
from hybridrl.run_files.run_paths import FILES, SETTINGS
from hybridrl.run_files.run_reader import RunReader, open_run
from hybridrl.system.bounded_files import load_json, load_yaml, read_text

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Of 300 bytes a list of 9**8 texts."""
DEEP = "[" * 100_000 + "]" * 100_000


def pipe(file):
    os.mkfifo(file)


def link(file):
    elsewhere = file.parent.parent / f"elsewhere-{file.name}"
    elsewhere.write_text('{"state": "secret", "why": "secret"}\n')
    file.symlink_to(elsewhere)


def device_link(file):
    file.symlink_to("/dev/zero")


def folder(file):
    file.mkdir()


def huge(file):
    with file.open("wb") as opened:
        opened.truncate(10 << 30)


def deep(file):
    file.write_text(DEEP)


def laughs(file):
    file.write_text(LAUGHS)


STRANGE = [pipe, link, device_link, folder, huge, deep, laughs]


@pytest.mark.parametrize("make", few_of(STRANGE, [pipe, link]), ids=lambda make: make.__name__)
def test_whatever_stands_for_a_file_of_a_run_the_rest_is_shown(tmp_path, make):
    run = run_folder(tmp_path / "run")
    for name in (*FILES, "samples/step-000001.parquet", "tokens/step-000001.parquet"):
        if name == "metrics.jsonl" and make in (pipe, link, device_link, folder):
            continue  # it marks the folder as a run's
        (run / name).unlink(missing_ok=True)
        make(run / name)
    for name in ("logs", "failed", "bad-steps", "checkpoints/step-000001"):
        (run / name).mkdir(parents=True)
    for name in ("logs/a.log", "failed/x.json", "bad-steps/step-000001.json"):
        make(run / name)
    make(run / "checkpoints/step-000001/complete.json")
    data = ReportContent(open_run(run)).data()
    assert "secret" not in json.dumps(data)
    if make is not laughs:
        assert any(
            "config.yaml could not be read" in one["line"] for one in data["state"]["warnings"]
        )
    render_top_screen(RunReader(run), 80)
    render_prometheus_metrics({run: RunReader(run).rows()})
    with pytest.raises(ConfigError, match=r"config\.yaml could not be read: .*\."):
        load_run_config(run / SETTINGS)


@pytest.mark.parametrize(
    "make", few_of(STRANGE, [m for m in STRANGE if m is not huge]), ids=lambda make: make.__name__
)
def test_commands_say_which_file_of_a_run_is_none(tmp_path, make, capsys):
    run = run_folder(tmp_path / "run")
    (run / "steps.jsonl").unlink()
    make(run / "steps.jsonl")
    with pytest.raises(DataError, match=r"steps\.jsonl.*\.$"):
        read_recorded_steps(run)
    (run / "cluster.json").write_text("{}")
    (run / "placement.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"steps\.jsonl"):
        RecordedRun.at(run)
    (run / "config.yaml").unlink()
    make(run / "config.yaml")
    step = run / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    (step / "complete.json").write_text('{"step": 1, "files": {}}')
    if make not in (pipe, folder, device_link):  # as good as none
        assert run_command("checkpoint", "list", str(run)) == 2
        assert "config.yaml could not be read" in capsys.readouterr().err
    assert run_command("report", str(run)) == 0


def test_only_plain_files_of_a_bounded_size_are_read(tmp_path):
    for make, why in {
        pipe: "no regular file",
        folder: "no regular file",
        link: "it is a link",
        huge: "more than the 64 MiB",
        deep: "nested too deeply",
    }.items():
        make(tmp_path / make.__name__)
        with pytest.raises((OSError, ValueError), match=why):
            load_json(tmp_path / make.__name__)
    with pytest.raises(ValueError, match=r"line 2 has an alias \(\*a\)"):
        load_yaml(_written(tmp_path / "a.yaml", LAUGHS))
    with pytest.raises(ValueError, match="nested too deeply"):
        load_yaml(_written(tmp_path / "b.yaml", DEEP))
    assert load_yaml(_written(tmp_path / "c.yaml", "a: &x [1]\n")) == {"a": [1]}
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "nothing")


def test_of_a_long_file_of_metrics_the_newest_lines_are_read(tmp_path, monkeypatch):
    from hybridrl.run_files import metric_reader

    monkeypatch.setattr(metric_reader, "MOST_BYTES", 1000)
    monkeypatch.setattr(metric_reader, "MOST_LINE_BYTES", 100)
    lines = [json.dumps({"step": step, "x": 1.0}) + "\n" for step in range(200)]
    lines[195] = json.dumps({"step": 195, "x": 1.0, "long": "x" * 200}) + "\n"
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(lines))
    steps = [row["step"] for row in MetricReader(file).rows()]
    assert steps == [step for step in range(steps[0], 200) if step != 195] and len(steps) > 20


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return ended.value.code


def _written(file, text):
    file.write_text(text)
    return file

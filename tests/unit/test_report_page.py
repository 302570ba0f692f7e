"""From run folders to what their report shows: text that is only text, few enough bytes, and a
sentence or an empty part where something is missing."""

import json
import os
import re

import pytest
from run_folders import HOSTILE, run_folder, write_samples

from hybridrl import cli
from hybridrl.errors import ConfigError
from hybridrl.report.html_page import render_report_page
from hybridrl.report.metric_curves import build_curves, thin_curve
from hybridrl.report.report_content import ReportContent
from hybridrl.report.report_tables import differences
from hybridrl.report.sample_browser import build_sample_browser, decode_tokens
from hybridrl.run_files.run_reader import open_run
from hybridrl.system.storage import to_json

DATA = re.compile(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', re.S)


def report_of(*folders):
    runs = [open_run(folder) for folder in folders]
    return render_report_page(runs[0].name, ReportContent(runs[0], runs[1:]).data())


def data_in(text):
    return {name: json.loads(found) for name, found in DATA.findall(text)}


def test_what_a_model_says_is_never_markup(tmp_path):
    run = run_folder(tmp_path / "run<b>", says=HOSTILE)
    (run / "logs").mkdir()
    (run / "logs" / "actor-0.log").write_text(f"WARNING {HOSTILE}\n")
    text = report_of(run)
    assert text.count("</script>") == text.count("<script") == 9  # eight parts and the program
    assert "<img" not in text and "<title>run&lt;b&gt;</title>" in text
    assert HOSTILE in [one["response"] for one in data_in(text)["samples"]["samples"]]
    assert HOSTILE[:40] in data_in(text)["state"]["warnings"][0]["line"]


def test_the_page_asks_nobody_for_anything(tmp_path):
    text = report_of(run_folder(tmp_path / "run"))
    assert "default-src 'none'" in text and "connect-src 'none'" in text
    program = DATA.sub("", text)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", program)


def test_every_part_is_there(tmp_path):
    found = data_in(report_of(run_folder(tmp_path / "run")))
    assert found["head"]["step"] == 3 and found["head"]["status"]["state"] == "finished"
    assert found["curves"]["runs"][0]["series"]["reward/mean"]["x"] == [1, 2, 3]
    assert [role for one in found["timeline"]["devices"] for role in one["roles"]] == ["actor"]
    assert len(found["timeline"]["steps"]) == 3
    assert found["settings"]["defaults"]["rows"][0]["name"] == "trainer.steps"
    assert found["state"]["memory"]["rows"][0]["seen"] == 1.5
    sample = found["samples"]["samples"][0]
    assert sample["tokens"]["response_mask"] == [1, 0] and sample["turn_rewards"] == [0, 1]


def test_a_long_run_is_thinned_and_says_so(tmp_path):
    run = run_folder(tmp_path / "run", steps=2500, samples_at=())
    for step in range(10, 510, 10):
        write_samples(run, step, rows=64, says="long " * 400)
    text = report_of(run)
    assert len(text.encode()) <= 5_000_000
    found = data_in(text)
    assert len(found["curves"]["runs"][0]["series"]["reward/mean"]["x"]) <= 1000
    assert "1,000 points" in found["curves"]["runs"][0]["note"]
    assert found["samples"]["note"].startswith("12 of 50 files of samples are shown")
    steps = [one["step"] for one in found["samples"]["sources"]]
    assert steps[0] == 10 and steps[-1] == 500
    assert "of 2500 recorded steps" in found["timeline"]["note"]


def test_whole_groups_are_kept_and_at_least_one(tmp_path):
    run = open_run(run_folder(tmp_path / "run", rows=40, says="word " * 100))
    found = build_sample_browser(run, most_bytes=4000)["samples"]
    assert 0 < len(found) < 40 and len(found) % 4 == 0
    (one,) = build_sample_browser(run, most_bytes=1)["samples"]  # however little room there is
    assert "word" in json.dumps(one)


def test_extremes_survive_thinning():
    values = [0.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    steps, kept = thin_curve(range(5000), values, 100)
    assert len(kept) <= 100 and max(kept) == 9.0 and min(kept) == -9.0
    assert steps == sorted(steps)


def test_what_is_no_number_is_left_out_of_curves():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": float("nan")}, {"step": 3, "b": float("inf")}]
    assert build_curves(rows)["series"] == {"a": {"x": [1], "y": [1.0]}}


@pytest.mark.parametrize("file", ["metrics.jsonl", "steps.jsonl"])
def test_a_last_line_cut_short_is_left_out(tmp_path, file):
    run = run_folder(tmp_path / "run")
    text = (run / file).read_text()
    (run / file).write_text(text[:-40])
    found = data_in(report_of(run))
    assert found["curves"]["runs"][0]["series"]["time/step"]["x"][:2] == [1, 2]
    assert len(found["timeline"]["steps"]) >= 2


def test_a_run_that_has_not_made_a_step(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("")
    found = data_in(report_of(run))
    assert found["samples"]["samples"] == [] and found["timeline"]["steps"] == []
    assert found["head"]["step"] == 0 and found["curves"]["runs"][0]["series"] == {}


def test_a_file_of_samples_that_cannot_be_read_is_named(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "samples" / "step-000002.parquet").write_text("cut")
    found = build_sample_browser(open_run(run))
    assert len(found["sources"]) == 1 and "step-000002.parquet" in found["unread"][0]


def test_settings_that_differ():
    one = {"trainer": {"steps": 40}, "run": {"name": "a"}, "data": {"task": "arithmetic"}}
    other = {"trainer": {"steps": 60}, "run": {"name": "b"}, "data": {"task": "arithmetic"}}
    (row,) = differences(one)["rows"]
    assert (row["name"], row["default"], row["values"]) == ("trainer.steps", "120", ["40"])
    (row,) = differences(one, [other])["rows"]
    assert row["values"] == ["40", "60"]


def test_a_character_of_several_tokens_stands_with_its_last():
    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode(errors="replace")

    ids = list("aé€b".encode())
    assert decode_tokens(Bytes(), ids) == ["a", "", "é", "", "", "€", "b"]
    assert decode_tokens(Bytes(), list("é".encode())[:1]) == ["\N{REPLACEMENT CHARACTER}"]
    assert decode_tokens(None, [7]) == ["7 "]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "no run's folder"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: run_folder(path / "inner"), "It holds 1 run; the newest is"),
    ],
)
def test_a_folder_that_is_no_run_is_a_sentence(tmp_path, make, words):
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match=words):
        open_run(tmp_path / "x")


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path, capsys):
    one, other = run_folder(tmp_path / "one"), run_folder(tmp_path / "other", steps=5)
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(one)])
    assert ended.value.code == 0 and (one / "report.html").is_file()
    out = tmp_path / "both.html"
    with pytest.raises(SystemExit):
        cli.main(["report", str(one), "--against", str(other), "--out", str(out)])
    found = data_in(out.read_text())
    assert [run["name"] for run in found["curves"]["runs"]] == ["one", "other"]
    assert found["settings"]["against"]["rows"][0]["values"] == ["3", "5"]
    with pytest.raises(SystemExit) as refused:
        cli.main(["report", str(one), "--out", str(tmp_path)])
    assert refused.value.code == 2 and "is a folder" in capsys.readouterr().err


def test_a_run_stands_beside_itself_once(tmp_path):
    one, other = run_folder(tmp_path / "one"), run_folder(tmp_path / "other")
    (tmp_path / "latest").symlink_to(other)
    beside = [str(one), str(other), str(tmp_path / "latest")]
    with pytest.raises(SystemExit):
        cli.main(["report", str(one), "--against", *beside])
    found = data_in((one / "report.html").read_text())
    assert [run["name"] for run in found["curves"]["runs"]] == ["one", "other"]


def test_a_page_takes_the_place_of_files_only(tmp_path, capsys):
    run, pipe = run_folder(tmp_path / "run"), tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit) as refused:
        cli.main(["report", str(run), "--out", str(pipe)])
    assert refused.value.code == 2 and "a device or a pipe" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_run_without_a_recorded_step_is_not_told_to_be_no_run(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "steps.jsonl").unlink()
    assert ReportContent(open_run(run)).data()["timeline"]["note"] == "No step has been recorded."


def test_json_in_a_page_is_closed_by_nothing():
    from hybridrl.report.html_page import escape_script_json

    assert "<" not in escape_script_json({"a": HOSTILE}) and json.loads(
        escape_script_json({"a": HOSTILE})
    )
    assert to_json({"a": float("nan")}) == '{"a": null}'


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\xfe", b"[]", b"{", b'"x"', b"run: 3\n", b'{"step": 1}']
)
def test_files_that_say_nothing_spoil_only_their_part(tmp_path, junk):
    run = run_folder(tmp_path / "run")
    for name in ("metrics.jsonl", "steps.jsonl", "status.json", "summary.json", "config.yaml"):
        (run / name).write_bytes(junk)
    wrong_set = b'{"format": 1, "evaluations": [{"step": 1, "sets": {"a": {"metrics": {"m": 3}}}}]}'
    for name in ("evaluations.json", "recoveries.jsonl", "placement.json"):
        (run / name).write_bytes(wrong_set if name == "evaluations.json" else junk)
    found = data_in(report_of(run))
    assert len(found["samples"]["samples"]) == 8 and found["state"]["evaluations"] == {}

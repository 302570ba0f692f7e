"""What `run.dry` and `hybridrl plan` look at: everything of a start, at once, without a trace."""

import json
from dataclasses import replace

import pytest

from hybridrl import cli
from hybridrl.checks.check_list import Need
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.preflight import run_preflight
from hybridrl.main import run
from hybridrl.models import model_shape
from hybridrl.models.model_loading import make_tiny_config
from hybridrl.planner import job_roles as planner
from hybridrl.planner.machine import device_catalog as devices

TINY = ["model.tiny={hidden_size: 32, layers: 1, heads: 1}", "rollout=transformers"]


def problems_of(*overrides, **options):
    """What is wrong, and what was not looked at."""
    try:
        return [], run_preflight(load_config([*TINY, *overrides]), Need.FOLDER, **options)
    except ConfigError as error:
        return list(error.problems), []


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_default_job_is_right_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = [
        "First prompt as the model reads it: 25+9=",
        "The reference answer '34' scores: exact 1.",
    ]
    assert problems_of() == ([], told)
    run(load_config([*TINY, "run.dry=true"]))
    shown = capsys.readouterr()
    assert "prompts_per_step: 128" in shown.out
    assert shown.err.endswith("All checks passed. To start, leave run.dry=true out.\n")
    assert not list(tmp_path.iterdir())


def test_everything_wrong_is_told_at_once(tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "summary.json").write_text("{}")
    said, _ = problems_of(
        *("trainer.steps=-5", "metrics=[foo]", "reward.function=nope", f"run.directory={used}"),
        *("warmup.steps=0", "eval.by_column=nope", "rollout.max_tokens=999"),
    )
    text = "\n".join(said)
    for part in ("trainer.steps=-5", "foo", "`nope`", str(used), "eval.by_column", "max_tokens"):
        assert part in text, part
    assert len(said) == 6


def test_the_plan_of_a_start_is_made_and_refused_without_starting(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "read_node_memory", lambda: 2.0**20)
    with pytest.raises(ConfigError, match="This does not fit: while `actor` does `train`"):
        run(load_config([*TINY, "run.dry=true"]))


@pytest.mark.more
def test_a_model_that_cannot_be_planned_is_a_notice(monkeypatch, tmp_path, capsys):
    """Also where the job really runs."""

    def fail(*_, **__):
        raise TypeError("where()")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_shape, "measure_token_bytes", fail)
    monkeypatch.setattr(model_shape, "_counted", {})
    monkeypatch.setattr(model_shape, "_few_layers", {})
    monkeypatch.setattr(planner, "_SHAPES", {})
    run(load_config([*TINY, "run.dry=true"]))
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be counted" in said and "The job starts without a plan" in said
    job = ["executor=inline", "devices=cpu", "warmup.steps=0", "trainer.steps=1", "eval.prompts=4"]
    config = load_config([*TINY, *job, "data.prompts_per_step=2", "run.directory=run"])
    assert run(config)
    assert "The job starts without a plan" in " ".join("".join(capsys.readouterr()).split())
    config = replace(config, run=replace(config.run, directory="other"))
    with pytest.raises(ConfigError, match="placement=auto compares plans"):
        run(replace(config, placement=replace(config.placement, strategy="auto")))


def test_a_plan_says_what_a_start_refuses(tmp_path):
    config = make_tiny_config(hidden_size=32, layers=1, heads=1, context=64)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    said, unseen = problems_of(f"model.path={tmp_path}", plans=True)
    assert not said and "A start would refuse it" in unseen[0] and "quantised (fp8)" in unseen[0]


def test_rows_without_a_model_are_one_thing_wrong(data):
    said, _ = problems_of("data=jsonl", f"data.path={data}")
    assert len(said) == 1 and "model.path is not set" in said[0]


def test_what_is_not_here_is_named_and_not_looked_for(data):
    _, unseen = problems_of(
        *("data=jsonl", f"data.path={data}", "model.path=some-name/on-the-hub", "warmup.steps=0")
    )
    assert unseen == [
        "model.path=some-name/on-the-hub was not looked at: it is no file or folder here.",
        "So the data was not read, either.",
    ]
    gone = ["data=jsonl", "data.path=/nowhere/x.jsonl", "model.path=on/hub", "warmup.steps=0"]
    _, unseen = problems_of(*gone, is_elsewhere=True)
    assert "data.path=/nowhere/x.jsonl was not looked at: it is not on this machine." in unseen


def test_data_and_model_that_are_not_there_are_both_told():
    gone = ["data=jsonl", "data.path=prompts.jsonl", "model.path=/nowhere/model", "warmup.steps=0"]
    (model, rows), _ = problems_of(*gone)
    assert "model.path=/nowhere/model: there is no such folder" in model
    assert "`prompts.jsonl`" in rows


def test_a_path_that_is_no_name_is_a_folder_that_is_not_there(data):
    said, unseen = problems_of("data=jsonl", f"data.path={data}", "model.path=runs/mine/model")
    assert any("model.path=runs/mine/model: there is no such folder" in one for one in said)
    assert unseen == []


def test_a_description_without_weights_is_enough_for_a_plan(tmp_path, data):
    (tmp_path / "model").mkdir()
    make_tiny_config(hidden_size=32, layers=1, heads=1, context=64).save_pretrained(
        tmp_path / "model"
    )
    given = ["data=jsonl", f"data.path={data}", f"model.path={tmp_path / 'model'}"]
    said, unseen = problems_of(*given, "warmup.steps=0", plans=True)
    assert said == [] and unseen[0].endswith("was not looked at: it has no weights.")
    said, _ = problems_of(*given, "warmup.steps=0")
    assert "no weights" in said[0]


def test_run_folders_that_cannot_be_are_told(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (said,), _ = problems_of(f"run.root={file}/runs")
    assert "run.root" in said and str(file) in said
    (said,), _ = problems_of(f"run.directory={file}")
    assert "run.directory" in said


def test_models_and_data_of_two_devices_are_placed(monkeypatch):
    with pytest.raises(ConfigError, match=r"actor\.parallel\.tp|devices"):
        run(load_config([*TINY, "run.dry=true", "num_devices=2", "actor.parallel.tp=4"]))


@pytest.mark.parametrize("lengths", ["nan+inf", "-5+-5", "0+3", "3", "a+b"])
def test_a_plan_takes_lengths_that_can_be(lengths, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *TINY, f"--lengths={lengths}"])
    assert ended.value.code == 2 and "--lengths" in capsys.readouterr().err


def test_a_plan_refuses_what_a_start_refuses(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", *TINY, "rollout.temperature=-1", "trainer.steps=-5"])
    said = capsys.readouterr().err
    assert "rollout.temperature" in said and "trainer.steps" in said


@pytest.mark.more
def test_a_plan_asks_for_no_folder_that_only_a_start_makes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("config.yaml", "summary.json"):
        (tmp_path / "runs" / name).write_text("{}")
    said, _ = problems_of()
    assert len(said) == 1 and "run.root=runs is in" in said[0]
    for search in ([], ["--search", "--deadline", "5"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *TINY, "executor=inline", "--lengths", "8+8", *search])
        assert ended.value.code == 0 and not capsys.readouterr().err

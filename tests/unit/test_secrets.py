"""Secrets among the settings are used, and written down nowhere."""

import io
import json
import logging
import pickle
import sys
import traceback

import pytest
from tiers import few_of

from hybridrl import main
from hybridrl.composition.load import config_to_dict, format_config_yaml
from hybridrl.composition.secrets import SecretStr, is_secret_name, redact_command_line
from hybridrl.console.safe_text import sanitize_line, sanitize_lines
from hybridrl.errors import ConfigError, StorageError
from hybridrl.job.config_resolution import load_config
from hybridrl.run_files.run_status import RunStatus
from hybridrl.system import redaction
from hybridrl.system.locations import RemotePath
from hybridrl.system.redaction import redact, register_secrets
from hybridrl.system.storage import to_json

OPTIONS = [
    "reward.options.score.api_key=${oc.env:SERVICE_KEY}",
    "reward.options.score.password=hunter2",
    "reward.options.score.header=Bearer ${oc.env:API_TOKEN}",
    "reward.options.score.deep={auth: [{secret: inner}]}",
    "rollout.engine_options.hf_token=hf_abc",
]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "sk-1")
    monkeypatch.setenv("API_TOKEN", "tk-2")
    return load_config(OPTIONS)


def test_they_are_used(config):
    options = pickle.loads(pickle.dumps(config)).reward.options["score"]
    assert options["api_key"] == "sk-1" and f"{options['api_key']}" == "sk-1"
    assert options["header"] == "Bearer tk-2"
    assert options["deep"] == {"auth": [{"secret": "inner"}]}
    assert config.rollout.engine_options == {"hf_token": "hf_abc"}


def test_they_are_written_nowhere(config):
    plain = config_to_dict(config)
    for text in (
        format_config_yaml(config),
        json.dumps(plain),
        repr(config),
        f"{config.reward.options}",
    ):
        for secret in ("sk-1", "tk-2", "hunter2", "inner", "hf_abc"):
            assert secret not in text
    assert plain["reward"]["options"]["score"] == {
        "api_key": "${oc.env:SERVICE_KEY}",
        "password": "***",
        "header": "Bearer ${oc.env:API_TOKEN}",
        "deep": {"auth": [{"secret": "***"}]},
    }


def resumed(folder, *overrides):
    return load_config([f"resume={folder}", *overrides])


@pytest.fixture
def run(config, tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    (step / "complete.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text(format_config_yaml(config))
    return tmp_path / "run"


AGAIN = [
    "reward.options.score.password=hunter3",
    "reward.options.score.deep={auth: [{secret: inner}]}",
    "rollout.engine_options.hf_token='${oc.env:API_TOKEN}'",
]


def test_a_run_goes_on_with_references_and_asks_for_the_others(run, monkeypatch):
    with pytest.raises(ConfigError, match=r"resume=.*password is a secret.*Give it again: reward"):
        resumed(run)
    found = resumed(run, *AGAIN)
    assert found.reward.options["score"]["api_key"] == "sk-1"
    assert found.reward.options["score"]["password"] == "hunter3"
    written = config_to_dict(found)
    assert written["reward"]["options"]["score"]["api_key"] == "${oc.env:SERVICE_KEY}"
    assert written["reward"]["options"]["score"]["password"] == "***"
    assert written["rollout"]["engine_options"] == {"hf_token": "${oc.env:API_TOKEN}"}
    monkeypatch.delenv("SERVICE_KEY")
    with pytest.raises(ConfigError, match=r"api_key.* 'SERVICE_KEY' not found"):
        resumed(run, *AGAIN)


PLACES = [
    "data.eval_path=https://me:hunter2@host/rows.jsonl",
    "reward.function=[exact,ftp://me:p:w/../x.py:f]",
    "data.path='https://me:${oc.env:PASSWORD}@host/x'",
]


def test_passwords_of_urls_are_used_and_written_nowhere(run, monkeypatch):
    monkeypatch.setenv("PASSWORD", "hunter3")
    found = load_config(PLACES)
    assert found.data.eval_path == "https://me:hunter2@host/rows.jsonl"
    assert found.data.path == "https://me:hunter3@host/x"
    plain = config_to_dict(found)
    assert plain["data"]["eval_path"] == "https://me:***@host/rows.jsonl"
    assert plain["data"]["path"] == "https://me:${oc.env:PASSWORD}@host/x"
    assert plain["reward"]["function"][1] == "ftp://me:p:w/../x.py:f"
    assert "hunter" not in format_config_yaml(found) + repr(found)
    assert redact_command_line(PLACES)[::2] == [PLACES[0].replace("hunter2", "***"), PLACES[2]]
    (run / "config.yaml").write_text(format_config_yaml(found))
    with pytest.raises(ConfigError, match=r"data.eval_path is a secret.*data.eval_path=\.\.\."):
        resumed(run)
    again = resumed(run, PLACES[0])
    assert (
        again.data.eval_path == found.data.eval_path
        and config_to_dict(again)["data"] == plain["data"]
    )
    (run / "config.yaml").write_text("checkpoint: {folder: 's3://me:***@host/x'}")
    with pytest.raises(ConfigError, match=r"password is not written down.* checkpoint.folder=<URL"):
        resumed(run)


def test_what_is_called_a_secret():
    for name in ("api_key", "apikey", "key", "HF_TOKEN", "client-secret", "password", "secrets"):
        assert is_secret_name(name), name
    for name in ("max_tokens", "eos_token", "stop_token", "keyboard", "monkey", "score", "n"):
        assert not is_secret_name(name), name


def test_the_command_line_in_the_summary_has_none():
    said = ["python", "-m", "hybridrl.main", "rollout.max_tokens=8", "trainer.steps=3"]
    assert redact_command_line(said) == said
    assert redact_command_line(
        [
            "reward.options.score.api_key=sk-1",
            "reward.options.score.api_key=${oc.env:KEY}",
            "reward.options.score={api_key: sk-1, width: 3, token: '${oc.env:T}'}",
        ]
    ) == [
        "reward.options.score.api_key=***",
        "reward.options.score.api_key=${oc.env:KEY}",
        "reward.options.score={api_key: ***, width: 3, token: '${oc.env:T}'}",
    ]


TEXT = "zq7Xv9-Kw3Text"
HIDING = [
    ("checkpoint.folder", f"https://user:{TEXT}@host/x"),
    ("checkpoint.folder", f"https://{TEXT}@host/x"),
    ("checkpoint.folder", "https://user:${oc.env:PLAIN}@host/x"),
    ("checkpoint.folder", "${oc.env:PLACE}"),
    ("data.path", f"https://host/x?a=b&X-Amz-Signature={TEXT}"),
    ("reward.options.score.api_key", TEXT),
    ("reward.options.score.api_key", "${oc.env:PLAIN}"),
    ("reward.options.score.header", "Bearer ${oc.env:API_TOKEN}"),
    ("reward.options.score.deep", f"{{auth: [{{secret: {TEXT}}}]}}"),
    ("rollout.engine_options.hf_token", TEXT),
    ("environment.options.password", TEXT),
    ("eval.sets.other.reward.options.score.token", TEXT),
    ("trainer.password", TEXT),
]
FAULTS = {
    "a setting that is not there": "{0} x{0}",
    "a setting in the wrong group": "trainer.{0}",
    "a number": "{0} trainer.steps={1}",
    "a preset": "{0} algorithm={1}",
    "a list": "{0} data.sources={1}",
    "taken away": "~{0}",
    "not closed": "{0}}} trainer.steps=x",
    "a flag": "{0} --flag",
    "a command": "plan {0}",
    "several": "{0} --multirun trainer.steps=1,x",
    "an unset variable": "{0} run.name=${{oc.env:NOT_THERE}}",
    "resumed": "{0} resume={1}",
    "forked": "{0} fork=missing",
}
RECIPES = {"wrong": "{0}: {1}\ntrainer.stepss: 3\n", "no YAML": "{0}: {1}\n  : [\n"}


@pytest.fixture
def variables(monkeypatch):
    for name in ("PLAIN", "API_TOKEN"):
        monkeypatch.setenv(name, TEXT)
    monkeypatch.setenv("PLACE", f"https://user:{TEXT}@host/x")


@pytest.mark.parametrize("place", few_of(HIDING, 5), ids=" ".join)
def test_no_failing_start_shows_one(place, variables, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    key, value = place
    starts = {}
    every = place in (HIDING[0], HIDING[5])  # the others are shown by what shows these
    for fault, form in FAULTS.items() if every else [("taken away", FAULTS["taken away"])]:
        bare = value if "://" in value else "1.5"
        words = form.format("\0", "\1").split(" ")
        starts[fault] = [word.replace("\0", f"{key}={value}").replace("\1", bare) for word in words]
    for fault, form in RECIPES.items():
        (tmp_path / f"{fault}.yaml").write_text(form.format(key, value))
        starts[f"recipe: {fault}"] = [f"recipe={fault}.yaml"]
    for fault, arguments in starts.items():
        redaction._secrets.clear()
        redaction._pattern = None
        monkeypatch.setattr(sys, "argv", ["hybridrl", *arguments])
        with pytest.raises(SystemExit):
            main.main()
        said = "".join(capsys.readouterr())
        assert said and TEXT not in said, (fault, arguments)


def test_nothing_that_leaves_the_process_shows_one(tmp_path, monkeypatch):
    register_secrets(f"reward.options.score.api_key={TEXT}")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    redaction.redact_output()
    sys.stderr.write(f"printed {TEXT}\n")
    handler = logging.StreamHandler()
    handler.handle(logging.makeLogRecord({"msg": "logged %s", "args": (TEXT,)}))
    try:
        raise ValueError(f"raised {TEXT}")
    except ValueError as error:
        traceback.print_exception(error)
        state = RunStatus(tmp_path)
        state.begin()
        state.end(error)
    assert shown.getvalue().count("***") == 3
    written = [shown.getvalue(), (tmp_path / "status.json").read_text()]
    written += [str(StorageError(f"for {TEXT}")), str(ConfigError("one", f"two {TEXT}"))]
    written += [sanitize_line(TEXT, 80), sanitize_lines(TEXT), to_json({"lost": [TEXT]})]
    assert all(TEXT not in text and "***" in text for text in written)


def test_a_process_that_gets_settings_knows_their_secrets():
    settings = pickle.dumps(
        {"key": SecretStr(TEXT), "at": SecretStr("https://me:hunter2@host", "...")}
    )
    redaction._secrets.clear()
    redaction._pattern = None
    assert redact(TEXT) == TEXT
    pickle.loads(settings)
    assert redact(f"{TEXT} https://me:hunter2@host") == "*** https://me:***@host"
    RemotePath("memory://me:place-pw@host/x")
    assert redact("at me:place-pw@host") == "at me:***@host"


def test_one_is_found_as_others_write_it():
    register_secrets("reward.options.score.password='a\"b c/ü'")
    for text in ('a"b c/ü', "a%22b%20c%2F%C3%BC", json.dumps('a"b c/ü'), repr('a"b c/ü')):
        assert redact(text).strip("'\"") == "***"
    register_secrets("reward.options.score={api_key: hunter2, width: 31}")
    assert redact("hunter2 hunter22 31") == "*** hunter22 31"


def test_words_that_are_no_secret_stay():
    for said in (
        "rollout.engine_options.token=true",
        "reward.options.score.key=abc",
        "rollout.stop=[</s>]",
        "model.path=https://host/a?page=20000",
        "model.tokenizer=some/tokenizer",
    ):
        register_secrets(said)
    said = "true abc </s> https://host/a?page=20000 some/tokenizer"
    assert redact(said) == said


def test_numbers_and_signatures_are_written_nowhere(run):
    found = load_config(
        [
            "reward.options.score.pin_key=12345678",
            "reward.options.score.width=12345678",
            "data.path='https://host/x?sig=abcdef&page=2'",
            "data.eval_path=https://abcdef@host/x",
        ]
    )
    assert found.reward.options["score"]["pin_key"] == 12345678
    plain = config_to_dict(found)
    assert plain["reward"]["options"]["score"] == {"pin_key": "***", "width": 12345678}
    assert plain["data"]["path"] == "https://host/x?sig=***&page=2"
    assert plain["data"]["eval_path"] == "https://***@host/x"
    (run / "config.yaml").write_text(format_config_yaml(found))
    with pytest.raises(ConfigError, match=r"data.path is a secret"):
        resumed(run)

"""Secrets among the settings are used, and written down nowhere."""

import json
import pickle

import pytest

from hybridrl.config.load import load_config, to_plain, to_yaml
from hybridrl.config.secrets import command_line, is_secret
from hybridrl.errors import ConfigError

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
    plain = to_plain(config)
    for text in (to_yaml(config), json.dumps(plain), repr(config), f"{config.reward.options}"):
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
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
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
    written = to_plain(found)
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
    plain = to_plain(found)
    assert plain["data"]["eval_path"] == "https://me:***@host/rows.jsonl"
    assert plain["data"]["path"] == "https://me:${oc.env:PASSWORD}@host/x"
    assert plain["reward"]["function"][1] == "ftp://me:p:w/../x.py:f"
    assert "hunter" not in to_yaml(found) + repr(found)
    assert command_line(PLACES)[::2] == [PLACES[0].replace("hunter2", "***"), PLACES[2]]
    (run / "config.yaml").write_text(to_yaml(found))
    with pytest.raises(ConfigError, match=r"data.eval_path is a secret.*data.eval_path=\.\.\."):
        resumed(run)
    again = resumed(run, PLACES[0])
    assert again.data.eval_path == found.data.eval_path and to_plain(again)["data"] == plain["data"]
    (run / "config.yaml").write_text("checkpoint: {folder: 's3://me:***@host/x'}")
    with pytest.raises(ConfigError, match=r"password is not written down.* checkpoint.folder=<URL"):
        resumed(run)


def test_what_is_called_a_secret():
    for name in ("api_key", "apikey", "key", "HF_TOKEN", "client-secret", "password", "secrets"):
        assert is_secret(name), name
    for name in ("max_tokens", "eos_token", "stop_token", "keyboard", "monkey", "score", "n"):
        assert not is_secret(name), name


def test_the_command_line_in_the_summary_has_none():
    said = ["python", "-m", "hybridrl.main", "rollout.max_tokens=8", "trainer.steps=3"]
    assert command_line(said) == said
    assert command_line(
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

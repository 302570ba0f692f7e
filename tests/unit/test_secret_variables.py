"""Programs of others start without the job's secrets."""

import sys

import pytest

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.system.secret_variables import passing_hint, without_secrets

SECRETS = {
    "RAY_AUTH_TOKEN": "x",
    "RAY_ADDRESS": "host:6379",
    "OPENAI_API_KEY": "x",
    "HF_TOKEN": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "GOOGLE_APPLICATION_CREDENTIALS": "/x.json",
    "client_secret": "x",
    "DB_PASSWORD": "x",
    "PGPASSWORD": "x",
    "DATABASE_URL": "postgres://user:word@host/x",
    "BROKER_URL": "amqp://user:wo'rd@host/x",
}
OTHERS = {
    "PATH": "/bin",
    "TOKENIZERS_PARALLELISM": "false",
    "KEYBOARD": "x",
    "http_proxy": "http://user:word@proxy:80",
    "INDEX_URL": "https://host/simple",
}


def test_variables_with_secrets_are_left_out_unless_they_are_named():
    assert without_secrets(SECRETS | OTHERS, []) == OTHERS
    kept = without_secrets(SECRETS | OTHERS, ["HF_TOKEN", "AWS_*"])
    assert set(kept) - set(OTHERS) == {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def test_a_failure_that_names_a_missing_variable_says_how_to_pass_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    said = passing_hint("KeyError: 'OPENAI_API_KEY'", "reward.env", [])
    assert "reward.env=[OPENAI_API_KEY]" in said
    assert passing_hint("KeyError: 'OPENAI_API_KEY_2'", "reward.env", []) == ""
    assert passing_hint("KeyError: 'OPENAI_API_KEY'", "reward.env", ["OPENAI_*"]) == ""


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("OF_THE_JOB_TOKEN", "abc")
    monkeypatch.setenv("PASSED_TOKEN", "def")


def test_environments_start_without_them(secret):
    program = "import os; os.environ['PASSED_TOKEN']; os.environ['OF_THE_JOB_TOKEN']"
    options = {"command": [sys.executable, "-c", program]}
    config = EnvironmentConfig("command", options, env=["PASSED_*"])
    pool = EnvironmentPool(config)
    try:
        pool.start([EpisodeRequest(0, {}, "http://127.0.0.1:9/session/e1/v1", "t", "e1", False)])
        (played,) = pool.poll(60.0)
    finally:
        pool.close()
    assert "KeyError: 'OF_THE_JOB_TOKEN'" in played.failure
    assert "environment.env=[OF_THE_JOB_TOKEN]" in played.failure


def test_reward_processes_start_without_them(secret):
    with RewardPool([passed_secrets], env=["PASSED_*"]) as pool:
        assert pool.score([{"prompt": "", "response": "", "answer": ""}]).scores == [3.0]


def passed_secrets(response, **row):
    """The length of the one that is passed."""
    import os

    return len(os.environ["PASSED_TOKEN"] + os.environ.get("OF_THE_JOB_TOKEN", ""))

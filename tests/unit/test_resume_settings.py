"""The settings of a resumed run: its own, but for what the command line gives."""

import pytest

from hybridrl.checks.settings import check
from hybridrl.config.load import load_config, to_plain, to_yaml
from hybridrl.config.resume import differences
from hybridrl.errors import ConfigError

OWN = ["algorithm=ppo", "algorithm.gamma=0.9", "models.critic.optimizer.learning_rate=1e-3"]


@pytest.fixture
def run(tmp_path):
    """A run's folder, with a step in it."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-000020").mkdir(parents=True)
    settings = load_config([*OWN, "trainer.steps=40", "checkpoint.every=20"])
    (folder / "config.yaml").write_text(to_yaml(settings))
    return folder


def test_what_no_override_says_is_as_in_the_run(run):
    for named in (run, run / "checkpoints" / "step-000020"):
        found = load_config([f"resume={named}", "trainer.steps=60"])
        assert found.trainer.name == "ppo" and found.algorithm.gamma == 0.9
        assert found.models == {"critic": {"optimizer": {"learning_rate": 1e-3}}}
        assert found.trainer.steps == 60 and found.run.directory == str(run)
        assert found.resume == str(named)


def test_overrides_win_and_presets_count_as_all_that_they_set(run):
    overrides = ["algorithm=safe_rlhf", "models.critic.optimizer.learning_rate=1e-4"]
    found = load_config([f"resume={run}", *overrides])
    assert found.trainer.name == "safe_rlhf" and found.cost is not None
    assert found.algorithm.gamma == 1.0 and found.trainer.steps == 40
    assert found.models["critic"]["optimizer"]["learning_rate"] == 1e-4
    found = load_config([f"resume={run}", "algorithm=grpo", "rollout=transformers"])
    assert found.trainer.name == "grpo" and found.rollout.engine == "transformers"
    assert found.algorithm.gamma == load_config([]).algorithm.gamma
    assert found.critic.value_clip == load_config([]).critic.value_clip


def test_auto_is_the_run_in_the_directory_or_a_new_one(run, tmp_path):
    given = ["resume=auto", "checkpoint.every=20"]
    found = load_config([*given, f"run.directory={run}"])
    assert found.trainer.name == "ppo" and found.trainer.steps == 40
    found = load_config([*given, f"run.directory={tmp_path / 'new'}"])
    assert found.trainer.name == "grpo" and found.trainer.steps == load_config([]).trainer.steps


def test_what_differs_is_a_line_each(run):
    before, now = load_config(OWN), load_config([*OWN, "trainer.steps=7", "resume=null"])
    assert differences(to_plain(before), to_plain(now)) == ["trainer.steps: 120 -> 7"]
    assert differences(to_plain(now), to_plain(now)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["resume={tmp}/gone"], "there is no such folder"),
        (["resume={tmp}"], "is no run with checkpoints"),
        (["resume={run}", "run.directory={tmp}/other"], "Leave run.directory out"),
        (["resume=auto"], "run.directory, which is not set"),
        (["resume=auto", "run.directory={tmp}/new"], "resume=auto without checkpoint.every"),
        (["resume={run}", "algorithm=evaluate"], "trains nothing"),
        (["resume={run}", "trainer.stepz=1"], "no setting `trainer.stepz`"),
    ],
)
def test_what_cannot_be_resumed_is_a_sentence(run, tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(load_config([o.format(run=run, tmp=tmp_path) for o in overrides]))


def test_settings_that_cannot_be_read_are_a_sentence(run):
    (run / "config.yaml").write_text("trainer: {stepz: 1}")
    with pytest.raises(ConfigError, match=r"config\.yaml could not be read: .*stepz"):
        load_config([f"resume={run}"])

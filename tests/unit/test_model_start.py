"""A run, or one of its steps, stands for the model in it."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config


@pytest.fixture
def run(tmp_path):
    """What a run with a critic leaves."""
    run = tmp_path / "run"
    step = run / "checkpoints" / "step-000002"
    for folder in (run / "model", run / "critic", step / "actor", step / "critic"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    (run / "config.yaml").touch()
    (step / "complete.json").touch()
    return run


def models(*overrides):
    config = load_config(list(overrides))
    critic = config.models.get("critic", {})
    return config.model.path, critic.get("path"), config.reward.model, config.reward.judge.path


def test_a_run_and_a_step_stand_for_the_model_of_the_role(run):
    step = run / "checkpoints" / "step-000002"
    for start, actor, critic in ((run, "model", "critic"), (step, "actor", "critic")):
        found = models(
            *(f"model.path={start}", f"models.critic.path={start}", f"reward.judge.path={start}")
        )
        assert found == (f"{start / actor}", f"{start / critic}", None, f"{start / actor}")
    # What has no model of the role's own gives the actor's.
    (step / "critic" / "config.json").unlink()
    (step / "critic").rmdir()
    assert models(f"models.critic.path={step}")[1] == f"{step / 'actor'}"


def test_a_model_folder_and_a_hub_name_stay_as_they_are(run):
    for path in (f"{run / 'model'}", "Qwen/Qwen3-0.6B", "nowhere"):
        assert models(f"model.path={path}", f"models.critic.path={path}")[:2] == (path, path)


def test_latest_is_the_run_that_it_means_now(run):
    (run.parent / "latest").symlink_to("run")
    for path in (run.parent / "latest" / "model", run.parent / "latest"):
        found = models(f"model.path={path}", f"models.critic.path={path}")
        assert found[0] == str(run / "model")
        assert found[1] in (str(run / "critic"), str(run / "model"))


def test_a_reward_model_is_that_of_a_run_which_trained_one(run):
    (run / "checkpoints" / "step-000002" / "critic").rename(
        run / "checkpoints" / "step-000002" / "reward_model"
    )
    step = run / "checkpoints" / "step-000002"
    assert models(f"reward.model={step}")[2] == f"{step / 'reward_model'}"
    assert models(f"reward.model={run}")[2] == f"{run / 'model'}"


def test_without_such_a_model_it_is_a_sentence(run):
    step = run / "checkpoints" / "step-000002"
    with pytest.raises(ConfigError, match=r"reward\.model=.*a step.*reward_model, reward\. Name"):
        models(f"reward.model={step}")

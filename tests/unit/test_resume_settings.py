"""The settings of a resumed run: its own, but for what the command line gives."""

import pytest

from hybridrl.checkpoint.resume import find_source
from hybridrl.checkpoint.stored_settings import changes_learning, differences, named_code
from hybridrl.checks.check_list import check
from hybridrl.composition.load import config_to_dict, format_config_yaml, load_run_config
from hybridrl.errors import ConfigError, MissingPackageError
from hybridrl.job.config_resolution import load_config

OWN = ["algorithm=ppo", "algorithm.gamma=0.9", "models.critic.optimizer.learning_rate=1e-3"]


def complete_step(folder, number):
    """Nothing of its contents is read here."""
    step = folder / f"step-{number:06d}"
    step.mkdir(parents=True)
    (step / "complete.json").touch()
    return step


@pytest.fixture
def run(tmp_path):
    """A run's folder, with a step in it."""
    folder = tmp_path / "run"
    complete_step(folder / "checkpoints", 20)
    settings = load_config([*OWN, "trainer.steps=40", "checkpoint.every=20"])
    (folder / "config.yaml").write_text(format_config_yaml(settings))
    return folder


def test_what_no_override_says_is_as_in_the_run(run):
    for named in (run, run / "checkpoints" / "step-000020"):
        found = load_config([f"resume={named}", "trainer.steps=60"])
        assert found.trainer.name == "ppo" and found.algorithm.gamma == 0.9
        assert found.models == {"critic": {"optimizer": {"learning_rate": 1e-3}}}
        assert found.trainer.steps == 60 and found.run.directory == str(run)
        assert found.resume == str(named)


def test_settings_that_there_are_no_more_do_not_matter(run):
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("observe:", "observe:\n  timeline_every: 4"))
    assert load_config([f"resume={run}"]).trainer.steps == 40
    assert load_run_config(file).trainer.steps == 40


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
    assert differences(config_to_dict(before), config_to_dict(now)) == ["trainer.steps: 120 -> 7"]
    assert differences(config_to_dict(now), config_to_dict(now)) == []


def test_code_that_settings_name_is_told():
    assert named_code(config_to_dict(load_config(["algorithm=grpo"]))) == []
    found = load_config(
        [
            "reward.function=[exact,hybridrl.rewards.code:passes_tests,their dir/score.py:score]",
            "trainer.name=their.module:Trainer",
            "environment.options.command=rm -r x",
        ]
    )
    assert set(named_code(config_to_dict(found) | {"run": {"root": "${oc.env:HOME}"}})) == {
        "reward.function=their dir/score.py:score",
        "trainer.name=their.module:Trainer",
        "environment.options.command=rm -r x",
        "run.root=${oc.env:HOME}",
    }


def test_settings_that_change_what_is_learned_come_first_and_are_marked():
    other = ["algorithm.gamma=0.5", "actor.parallel.tp=2", "observe.show_every=0", "run.seed=3"]
    lines = differences(
        config_to_dict(load_config(OWN)), config_to_dict(load_config([*OWN, *other]))
    )
    marked = [line.split(":")[0] for line in lines if "what is learned from here on" in line]
    assert marked == ["algorithm.gamma", "run.seed"]
    assert [line.split(":")[0] for line in lines[2:]] == ["actor.parallel.tp", "observe.show_every"]
    assert changes_learning("placement.staleness") and not changes_learning("placement.strategy")
    assert changes_learning("actor.parallel.gradients")
    assert changes_learning("actor.parallel.weights")
    assert not changes_learning("rollout.weight_sync", "auto", "full")
    assert changes_learning("rollout.weight_sync", "delta", "int8")


@pytest.mark.more
def test_a_fork_has_the_settings_of_the_other_run_and_a_folder_of_its_own(run, tmp_path):
    new = tmp_path / "new"
    for named in (run, run / "checkpoints", run / "checkpoints" / "step-000020"):
        found = load_config([f"fork={named}", "algorithm.gamma=0.5", f"run.directory={new}"])
        assert found.trainer.name == "ppo" and found.algorithm.gamma == 0.5
        assert found.trainer.steps == 40 and found.run.directory == str(new)
        source = find_source(found)
        assert found.fork == str(named) and source.steps == run / "checkpoints" and source.forks
    assert load_config([f"fork={run}"]).run.directory is None
    # The same command goes on with the new run as soon as that has a checkpoint.
    again = [f"fork={run}", "resume=auto", f"run.directory={new}"]
    assert load_config(again).trainer.name == "ppo" and find_source(load_config(again)).forks
    (new / "checkpoints" / "step-000025").mkdir(parents=True)  # that never became complete
    assert find_source(load_config(again)).forks
    complete_step(new / "checkpoints", 30)
    (new / "config.yaml").write_text(format_config_yaml(load_config(["algorithm.gamma=0.7"])))
    found = load_config(again)
    source = find_source(found)
    assert found.algorithm.gamma == 0.7 and source.run == new and not source.forks


def test_checkpoints_that_are_elsewhere_are_found_by_the_run_and_know_its_settings(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    step = complete_step(elsewhere, 20)
    run.mkdir()
    settings = format_config_yaml(
        load_config([*OWN, "checkpoint.every=9", f"checkpoint.folder={elsewhere}"])
    )
    (run / "config.yaml").write_text(settings)
    found = load_config([f"resume={run}"])
    assert find_source(found).steps == elsewhere and found.run.directory == str(run)
    assert found.checkpoint.folder == str(elsewhere)
    # The fork of such a run must not write, nor remove, among its checkpoints.
    assert load_config([f"fork={run}"]).checkpoint.folder is None
    (step / "config.yaml").write_text(settings)
    (run / "config.yaml").unlink()
    found = load_config([f"resume={step}", f"run.directory={tmp_path / 'other'}"])
    assert found.trainer.name == "ppo" and find_source(found).step == 20
    auto = ["resume=auto", f"checkpoint.folder={elsewhere}", f"run.directory={tmp_path / 'other'}"]
    assert load_config(auto).trainer.name == "ppo"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["resume={tmp}/gone"], "there is no such folder"),
        (["resume={tmp}"], "is no run with checkpoints"),
        (["resume={run}", "run.directory={tmp}/other"], "Leave run.directory out"),
        (["fork={tmp}/gone"], "fork=.*there is no such folder"),
        (["fork={run}", "run.directory={run}"], "needs a folder of its own"),
        (["fork={run}", "checkpoint.folder={run}/checkpoints"], "holds the checkpoints of the old"),
        (["fork={run}", "resume={run}"], "Leave one of them out"),
        (["fork={run}", "algorithm=evaluate"], "Leave fork out"),
        (["checkpoint.folder=nowhere://x", "checkpoint.every=1"], "nothing is known of nowhere://"),
        (["checkpoint.folder=gs://x/y", "checkpoint.every=1"], "needs a package"),
        (["resume=auto"], "run.directory, which is not set"),
        (["resume=auto", "run.directory={tmp}/new"], "resume=auto without checkpoint.every"),
        (["checkpoint.memory_copies=-1", "checkpoint.every=1"], "must be 0"),
        (
            ["checkpoint.memory_copies=1", "checkpoint.every=1", "executor=inline"],
            "executor=ray or",
        ),
        (
            ["checkpoint.memory_copies=1", "checkpoint.every=1", "checkpoint.asynchronous=false"],
            "asynchronous=true. Set that",
        ),
        (["resume={run}", "algorithm=evaluate"], "trains nothing"),
        pytest.param(
            *(["resume={run}", "trainer.stepz=1"], "no setting `trainer.stepz`"),
            marks=pytest.mark.more,
        ),
    ],
)
def test_what_cannot_be_resumed_is_a_sentence(run, tmp_path, overrides, words):
    with pytest.raises((ConfigError, MissingPackageError), match=words):
        check(load_config([o.format(run=run, tmp=tmp_path) for o in overrides]))


def test_settings_that_cannot_be_read_are_a_sentence(run):
    (run / "config.yaml").write_text("trainer: {stepz: 1}")
    with pytest.raises(ConfigError, match=r"config\.yaml could not be read: .*stepz"):
        load_config([f"resume={run}"])


def test_settings_that_are_no_text_are_a_sentence(run):
    (run / "config.yaml").write_bytes(b"\xff\xfe")
    for how in ([f"resume={run}"], [f"fork={run}"], ["resume=auto", f"run.directory={run}"]):
        with pytest.raises(ConfigError, match=r"config\.yaml could not be read.*Bring it back"):
            load_config(["checkpoint.every=20", *how])


def test_what_cannot_be_reached_is_a_sentence(tmp_path):
    url = "http://localhost:1/run"
    for how in ([f"resume={url}"], [f"fork={url}"], ["resume=auto", f"checkpoint.folder={url}"]):
        with pytest.raises(ConfigError, match=r"could not be read.*See whether it can"):
            load_config([*how, "checkpoint.every=20", f"run.directory={tmp_path}"])

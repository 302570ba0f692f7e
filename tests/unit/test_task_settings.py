"""What a built-in task needs belongs to that task, and no longer holds for rows from elsewhere."""

import json
import threading
from dataclasses import fields

import pytest

from hybridrl import cli
from hybridrl.checks.check_list import check
from hybridrl.composition.load import format_effective_yaml
from hybridrl.config.changed import apply_changes
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.config.schema import DataConfig
from hybridrl.errors import ConfigError
from hybridrl.evaluation.eval_sets import (
    INHERITED_DATA_SETTINGS,
    OF_TRAINING,
    resolve_eval_sets,
)
from hybridrl.job.config_resolution import apply_python_objects, load_config
from hybridrl.job.job_inputs import list_data_remarks

EVALUATE = ["algorithm=evaluate", "model.path=some/model", "executor=inline", "run.dry=true"]
SET = "eval.sets.math.data.path=math.jsonl"


def of(config):
    optimizer = config.actor.optimizer
    lengths = config.data.max_prompt_tokens, config.rollout.max_tokens
    return (*lengths, config.warmup.steps, optimizer.learning_rate, optimizer.schedule)


TOY, REAL = (16, 8, 118, 5e-4, "cosine"), (1024, 512, 0, 1e-6, "constant")


def test_the_task_has_its_settings_where_it_is_learned():
    config = load_config([])
    assert (config.data.task, *of(config)) == ("arithmetic", *TOY)
    head, _ = format_effective_yaml(config).split("\n", 1)
    assert head.startswith("# As data=arithmetic has them: ") and "rollout.max_tokens=8" in head
    assert not format_effective_yaml(load_config(["data=jsonl", "data.path=x"])).startswith("#")


def test_rows_of_a_program_have_no_settings_of_the_task():
    rows = [{"prompt": "1+1=", "answer": "2"}]
    assert of(apply_python_objects(load_config([]), None, rows, None)) == REAL
    files = load_config(["data=jsonl", "data.path=data.parquet"])
    assert apply_python_objects(load_config([]), None, rows, None) == files
    # what the user or another preset says stays, also where it is what the task has
    given = load_config(["rollout.max_tokens=8", "warmup.steps=0", "algorithm=sft"])
    found = apply_python_objects(given, None, rows, None)
    assert (found.rollout.max_tokens, found.data.max_prompt_tokens) == (8, 1024)
    sft = load_config(["algorithm=sft", "data=jsonl"]).actor.optimizer.learning_rate
    assert found.actor.optimizer.learning_rate == sft
    tool = apply_python_objects(load_config(["data=calculator"]), None, rows, None)
    assert tool.rollout.episode is None and tool.rollout.stop == []


def test_only_sets_are_evaluated_with_no_settings_of_the_task():
    for data in ([], ["data=jsonl"]):
        config = load_config([*EVALUATE, *data, SET])
        assert config.data.task is None and of(config) == REAL
        check(config)
        assert resolve_eval_sets(config)["math"].data.max_prompt_tokens == 1024
    with pytest.raises(ConfigError, match="There are no prompts"):
        check(load_config([*EVALUATE, "data=jsonl", SET, "eval.held_out=true"]))
    # without a model of one's own, or where the task itself is evaluated, it is the task
    assert load_config(["algorithm=evaluate", SET]).data.task == "arithmetic"
    assert load_config([*EVALUATE, SET, "eval.sets.own.samples=4"]).data.task == "arithmetic"


def test_a_set_beside_the_task_has_no_limits_of_the_task():
    limits = resolve_eval_sets(load_config([SET]))["math"].data.max_prompt_tokens
    assert limits == 1024
    given = load_config([SET, "data.max_prompt_tokens=16"])
    assert resolve_eval_sets(given)["math"].data.max_prompt_tokens == 16


def test_an_environment_brings_its_own_rows():
    config = load_config(["environment.name=gymnasium"])
    assert (config.data.task, config.warmup.steps) == ("environment", 0)
    assert config.actor.optimizer.learning_rate == 1e-6
    assert load_config(["environment.name=mcp", "data=arithmetic"]).data.task == "arithmetic"


@pytest.mark.parametrize("played", ["environment.name=command", "rollout.serve=true"])
def test_programs_reward_their_episodes_alone_unless_functions_are_named(played):
    jsonl = ["data=jsonl", "data.path=rows.jsonl"]
    assert load_config([*jsonl, played]).reward.function == []
    for named in ("reward.function=exact", "reward={function: exact}"):
        assert load_config([*jsonl, played, named]).reward.function == "exact"
    assert load_config(["data=reasoning_gym", played]).reward.function == "reasoning_gym"
    assert load_config(jsonl).reward.function == "exact"


def test_a_model_that_learns_the_task_by_default_is_told():
    class Rows:
        training, held_out = range(500), range(5)

    (said,) = list_data_remarks(load_config(["model.path=some/model"]), "prompts", Rows)
    assert "some/model learns the built-in task arithmetic" in said and "learning_rate" in said
    for named in (["data=arithmetic"], ["data.task=arithmetic"]):
        assert (
            list_data_remarks(load_config(["model.path=some/model", *named]), "prompts", Rows) == []
        )
    assert list_data_remarks(load_config([]), "prompts", Rows) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.path=llama-7b"], "prompts of up to data.max_prompt_tokens=1024 and responses of"),
        (["placement=separation"], "model.path is not set: this is the plan of a tiny model"),
    ],
)
def test_a_plan_says_what_it_plans(words, said, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", *words, "--devices", "64xH200"])
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert ("samples of 1024 + 512 tokens" in shown) == words[0].startswith("model.path")


def test_each_setting_of_data_is_inherited_by_sets_or_not():
    of_place = ["path", "split", "task", "tasks", "task_options", "rows"]
    lists = [*INHERITED_DATA_SETTINGS, *of_place, *OF_TRAINING]
    assert sorted(lists) == sorted(field.name for field in fields(DataConfig))


def test_sets_read_rows_as_the_job_does():
    words = ["data=jsonl", "data.path=x", "data.answer_format=gsm8k", "data.bad_rows=drop", SET]
    data = resolve_eval_sets(load_config(words))["math"].data
    assert (data.answer_format, data.bad_rows, data.path) == ("gsm8k", "drop", "math.jsonl")


def test_settings_that_sources_or_sets_read_are_not_called_idle(tmp_path):
    columns = ["data.prompt_column=question", "data.chat=true", "data.answer_format=gsm8k"]
    assert (
        find_ineffective_settings(load_config(["data=mixture", "data.sources.a.path=x", *columns]))
        == []
    )
    assert find_ineffective_settings(load_config([*EVALUATE, SET, *columns])) == []
    rows = ["data=mixture", "data.sources.a.task=reasoning_gym", "data.rows=50"]
    assert find_ineffective_settings(load_config(rows)) == []
    assert (
        "data.chat=True does nothing"
        in find_ineffective_settings(load_config(["data.chat=true"]))[0]
    )
    assert json.dumps(
        find_ineffective_settings(load_config(["data=jsonl", "data.path=x", "data.rows=50"]))
    )[2:11] == ("data.rows")


def test_objects_of_the_user_stay_the_same_ones():
    class Reward:
        def __init__(self):
            self.lock = threading.Lock()  # which nobody can copy

        def __call__(self, row):
            return 1.0

    reward, rows = Reward(), [{"prompt": "1+1=", "answer": "2"}]
    config = apply_python_objects(load_config([SET]), reward, rows, None)
    assert config.reward.function[0] is reward and resolve_eval_sets(config)["math"]
    assert apply_changes(config, [("rollout.max_tokens", 9)]).reward.function[0] is reward

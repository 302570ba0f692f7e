"""Reward functions are held against the data, and tried, before workers start. More of them are
tried by `make campaign`."""

import inspect

import numpy as np
import pytest
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.checks.check_list import check as check_settings
from hybridrl.checks.data.reward_data_checks import check_reward_data
from hybridrl.config.schema import ActorConfig, CostConfig
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.errors import ConfigError, DataError, RewardError
from hybridrl.rewards.loading import check_functions_fit_columns, check_reward_functions
from hybridrl.rewards.signature import (
    add_verl_names,
    check_parameters_in_columns,
    has_verl_signature,
)
from hybridrl.workers.reward_worker import RewardWorker

PROMPTS = Batch.from_columns(
    {"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "level": [1, 2], "scores": [0.0, 0.0]}
)


def parameters(function):
    return list(inspect.signature(function).parameters.values())


@pytest.fixture
def check(tmp_path):
    """Checks a function from a file of the user's against `PROMPTS`, or other rows."""

    def run(code, *overrides, rows=PROMPTS):
        (tmp_path / "mine.py").write_text(code)
        function = f"reward.function={tmp_path}/mine.py:score"
        check_reward_data(configured([function, *overrides]), rows)

    return run


def test_a_function_that_needs_what_there_is_passes():
    for function in (
        lambda prompt, response, answer, level: 0,
        lambda response, hint=None: 0,
        lambda response, *, scale: 0,
        lambda completions, prompts, level, **columns: 0,
        lambda data_source, solution_str, ground_truth, extra_info=None: 0,
    ):
        columns = ["prompt", "answer", "level", "data_source"]
        check_parameters_in_columns("score", parameters(function), columns, ["scale"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda response, hint: 0,
            r"needs `hint`, and a row has prompt, response, answer, scale\.",
        ),
        (lambda response, ground_truth: 0, "`ground_truth` is called `answer` here"),
        (lambda response, promt: 0, "Did you mean `prompt`"),
        (lambda completions, response: 0, "needs `response`, and a row has prompts, completions"),
        (lambda data_source, solution_str, ground_truth: 0, "needs `data_source`"),
    ],
)
def test_what_a_function_lacks_is_named_with_all_that_there_is(function, words):
    with pytest.raises(ConfigError, match=words):
        check_parameters_in_columns("score", parameters(function), ["prompt", "answer"], ["scale"])


def test_verls_names_are_known_to_functions_of_verls_shape_only():
    assert has_verl_signature(
        parameters(lambda data_source, solution_str, ground_truth, extra=0: 0)
    )
    assert not has_verl_signature(parameters(lambda solution_str, ground_truth: 0))
    row = add_verl_names({"response": "r", "answer": "a", "data_source": "d"})
    assert (row["solution_str"], row["ground_truth"], row["data_source"]) == ("r", "a", "d")


def test_columns_of_the_data_are_what_a_function_gets(check):
    check("def score(response, level): return level")
    with pytest.raises(ConfigError, match="needs `scores`, and a row has"):
        check("def score(response, scores): return 1.0")  # the library's own


def test_a_function_is_tried_where_its_failure_would_end_the_job(check):
    with pytest.raises(RewardError, match=r"(?s)first row.*prompt: '1.1='.*response: '2'.*'nope'"):
        check("def score(response, **row): return row['nope']")
    check("def score(response, **row): return row['nope']", "reward.on_error=drop")
    check("def score(response, **row): return float(response == row['answer'])")


def test_answers_that_nothing_can_be_compared_with_are_found(check):
    rows = Batch.from_columns({"prompt": ["1+1=", "2+2="], "answer": ["2", "four"]})
    numeric = configured(["reward.function=numeric"])
    with pytest.raises(DataError, match=r"reward.function=numeric .*'2.2='.*'four' holds no numb"):
        check_reward_data(numeric, rows)
    with pytest.raises(DataError, match="'four' holds no number"):
        check_reward_data(numeric, PROMPTS, rows)  # it would end the first evaluation
    check_reward_data(numeric, PROMPTS)
    check_reward_data(configured(["reward.function=numeric", "reward.on_error=drop"]), rows)


def test_options_of_built_in_functions_have_their_types():
    with pytest.raises(ConfigError, match=r"reward.options.length.limit=long: `length` cannot"):
        options = {"reward.options.length.limit": "long"}
        check_reward_data(
            configured(["reward.function=length", *(f"{k}={v}" for k, v in options.items())]),
            PROMPTS,
        )


def test_what_is_wrong_with_a_cost_is_said_of_the_cost():
    cost = ["algorithm=safe_rlhf", "cost.function=numeric", "cost.options.numeric.digits=3"]
    with pytest.raises(ConfigError, match=r"`cost\.options\.numeric\.digits` is set"):
        check_settings(configured(cost))
    with pytest.raises(
        ConfigError, match=r"`cost\.weights` has 2 entries and `cost\.function` has"
    ):
        check_settings(configured([*cost[:2], "cost.weights=[1,2]"]))


@pytest.mark.parametrize("group", ["cost", "eval.sets.s.reward", "data.sources.a.reward"])
def test_errors_name_files_of_functions_as_they_are_called(tmp_path, monkeypatch, group):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.options.py").write_text("def scores(response): return 1.0")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    function = "reward.options.py:score"
    settings = {
        "cost": ["algorithm=safe_rlhf", f"cost.function={function}"],
        "eval.sets.s.reward": [f"eval.sets.s.reward.function={function}"],
        "data.sources.a.reward": [
            *("data=mixture", "data.sources.a.task=arithmetic", "data.sources.b.task=calculator"),
            f"data.sources.a.reward={function}",
        ],
    }
    setting = group if group.startswith("data.") else f"{group}.function"
    with pytest.raises(ConfigError) as raised:
        check_settings(configured(settings[group]))
    assert f"`{setting}` names `{function}`, but that file defines no `score`" in str(raised.value)


def test_what_fails_while_a_cost_is_scored_is_said_of_the_cost(tmp_path):
    build_character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text("def score(response, **row): return None")
    config = CostConfig(function=f"{tmp_path}/mine.py:score")
    parts = (str(tmp_path), None, ActorConfig(), None, "cost")
    rows = Batch.from_columns({"prompt": ["1+1="], "response_ids": [np.array([3])]})
    worker = RewardWorker(WorkerContext("cost", 0, 1), config, *parts)
    with pytest.raises(RewardError, match=r"set `cost\.on_error` to `drop`.*`cost\.error_value`"):
        worker.compute_reward(rows)
    worker.close()


def test_an_import_that_hangs_is_stopped(check, monkeypatch):
    monkeypatch.setattr("hybridrl.checks.data.reward_data_checks._IMPORT_TIMEOUT_S", 0.5)
    code = "import time\ntime.sleep(99)\ndef score(response): return 1.0"
    said = r"`reward.function` names `.*mine.py:score`, and to import .* longer than 1 s"
    with pytest.raises(ConfigError, match=said):
        check(code, "reward.timeout_s=1")


def test_rows_of_other_kinds_are_left_alone():
    check_reward_data(
        configured(["reward.function=numeric"]), Batch.from_columns({"margin": [0.0]})
    )


def test_nothing_is_compared_with_answers_that_there_are_none_of(tmp_path):
    data = ["data=jsonl", f"data.path={tmp_path}/x.jsonl", "data.answer_column=null"]
    with pytest.raises(ConfigError, match=r"reward.function=exact compares .*answer_column=null"):
        check_reward_data(configured(["reward.function=exact", *data]), PROMPTS)


@pytest.mark.parametrize("name", ["mine", "length"])
def test_what_is_wrong_with_any_data_is_told_in_the_same_words(tmp_path, name):
    (tmp_path / "mine.py").write_text("def score(completion, answer): return 1.0")
    functions = [f"{tmp_path}/mine.py:score" if name == "mine" else name]
    with pytest.raises(ConfigError) as first:
        check_reward_functions(functions)
    with pytest.raises(ConfigError) as second:
        check_functions_fit_columns(functions, {}, ["prompt", "answer"])
    assert str(first.value) == str(second.value)


def test_the_start_says_what_each_function_gives_the_right_answer(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def strict(response, answer): return float(response == f'<answer>{answer}</answer>')\n"
        "def kind(response, answer): return 0.5 if answer in response else -1.0\n"
        "def broken(response, **row): return row['nope']\n"
    )
    mine = f"{tmp_path}/mine.py"

    def said(functions, *overrides, rows=PROMPTS):
        config = configured([f"reward.function=[{functions}]", *overrides])
        return [line for line in check_reward_data(config, rows) if "scores:" in line]

    for builtin in ("exact", "numeric", "boxed", "contains"):
        assert said(builtin) == [f"The reference answer '2' scores: {builtin} 1."]
    limit = "reward.options.length.limit=100"
    (line,) = said(f"{mine}:strict,{mine}:kind,length", limit)
    assert "'2' scores: strict 0, kind 0.5, length 0." in line
    assert "no reward from `strict`: a function that fails in silence" in line
    (line,) = said(f"{mine}:strict", "reward.weights=[-1.0]")
    assert "no reward" not in line
    (line,) = said(f"{mine}:broken", "reward.on_error=drop")
    assert line.endswith("scores: broken nothing.")
    some = Batch.from_columns({"prompt": ["a", "b"], "answer": ["", "b"]})
    assert said(f"{mine}:kind", rows=some) == ["The reference answer 'b' scores: kind 0.5."]
    assert said(f"{mine}:kind", rows=some.take([0])) == []
    (tmp_path / "mine.py").write_text("def any(response, **row): return 0.0\n")
    assert said(f"{mine}:any", rows=Batch.from_columns({"prompt": ["a"]})) == []


def test_the_right_answers_of_sources_are_told_apart(tmp_path):
    (tmp_path / "mine.py").write_text("def never(response, **row): return 0.0")
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sources = [
        f"data.sources.{name}={{path: {tmp_path}/{name}.jsonl, reward: {function}}}"
        for name, function in {"one": "exact", "two": f"{tmp_path}/mine.py:never"}.items()
    ]
    rows = PROMPTS.with_columns({"source": ["one", "two"]})
    said = [
        s for s in check_reward_data(configured(["data=mixture", *sources]), rows) if "scores" in s
    ]
    assert said[0] == "The reference answer of source one '2' scores: exact 1."
    assert said[1].startswith("The reference answer of source two '4' scores: never 0. So the")

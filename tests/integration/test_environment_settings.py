"""Environments that cannot be played are refused before anything starts, with the cure."""

import json
from pathlib import Path

import pytest

from hybridrl import load_config
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.environment_tasks import ENVIRONMENT_TASK
from hybridrl.job.job_inputs import load_job_rows
from hybridrl.models.model_loading import make_tiny_model

pytestmark = pytest.mark.more

INLINE = ("executor=inline", "rollout=transformers", "devices=cpu")
FILE = Path(__file__).parents[1] / "environments_that_fail.py"
TASKS = ("data=environment", "environment.tasks=20", "eval.prompts=4")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=environment"], ["environment.name"]),
        ([*TASKS, "environment.name=verifier"], ["Did you mean `verifiers`?"]),
        ([*TASKS, "environment.name=gymnasium", "environment.python=no/python"], ["no/python"]),
        ([*TASKS, "environment.name=verifiers"], ["package `verifiers`", "environment.python"]),
        (
            ["data=jsonl", f"data.path={FILE}", "environment.name=mcp"],
            ["`reward.function` is empty"],
        ),
        ([*TASKS, f"environment.name={FILE}:played"], ["Did you mean `play`?"]),
        ([*TASKS, f"environment.name={FILE}:play", "algorithm=dpo"], ["samples nothing"]),
        ([*TASKS, f"environment.name={FILE}:play", "warmup.steps=2"], ["warmup.steps=0"]),
        (
            [*TASKS, f"environment.name={FILE}:play", "rollout.episode=x.py:Y"],
            ["one of the two plays"],
        ),
        ([*TASKS, f"environment.name={FILE}:play", "model.tiny.context=200"], ["the model takes"]),
    ],
)
def test_wrong_environments_are_sentences(refusal, overrides, words):
    said = refusal(*INLINE, *overrides)
    assert all(word in said for word in words), said


def test_an_environment_is_loaded_once_before_anything_starts(refusal, tmp_path):
    """Also by a dry run; and its messages need a chat template."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}*2"}) + "\n" for n in range(20)))
    shape = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 512}
    model = make_tiny_model(
        tmp_path / "model", build_character_tokenizer(PRINTABLE_CHARACTERS), seed=0, **shape
    )
    said = refusal(
        *(*INLINE, f"model.path={model}", "data=jsonl", f"data.path={file}", "run.dry=true"),
        *("data.answer_column=null", "reward.function=[]", "environment.name=openenv"),
        *("environment.options.url=http://127.0.0.1:9", "rollout.max_tokens=64"),
    )
    assert "no OpenEnv server answers" in said and "chat template" in said


def test_tasks_of_an_environment_are_rows():
    config = load_config([*INLINE, *TASKS, f"environment.name={FILE}:play"])
    assert config.data.task == ENVIRONMENT_TASK and config.reward.function == []
    rows, _ = load_job_rows(
        config, "prompts", build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    )
    assert (len(rows.training), len(rows.held_out)) == (20, 4) and rows.examples is None
    row = rows.training.slice(0, 1).rows_for_users()[0]
    assert row["what"] == "good" and row["prompt"] == f"row {row['number']}"

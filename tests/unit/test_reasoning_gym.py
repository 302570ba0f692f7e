"""Tasks of reasoning-gym: rows with their verifiers."""

import json
import math

import pytest
from reasoning_gym.factory import DATASETS

from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.tasks.reasoning_gym import problems
from hybridrl.errors import ConfigError
from hybridrl.rewards.builtin_rewards import reasoning_gym

SLOW = {"composite", "knight_swap", "futoshiki", "arc_agi", "rearc", "zebra_puzzles", "puzzle24"}
"""To make; `arc_agi` is looked at for itself."""


def test_rows_of_several_tasks_hold_no_question_twice():
    settings = {"tasks": ["chain_sum", "rubiks_cube"], "rows": 100}
    training, held_out = problems(30, 1, **settings, task_options={"chain_sum": {"max_terms": 3}})
    assert (len(training), len(held_out)) == (100, 30)
    assert len({row["prompt"] for row in (*training, *held_out)}) == 130
    assert {row["source"] for row in held_out} == {"chain_sum", "rubiks_cube"}
    terms = [row["difficulty_num_terms"] for row in training]
    assert {2.0, 3.0} == {value for value in terms if not math.isnan(value)}
    assert (
        problems(30, 1, tasks=["chain_sum"], rows=9)[0]
        == problems(30, 1, tasks=["chain_sum"], rows=9)[0]
    )


def test_a_task_with_few_problems_keeps_most_of_them_to_learn_from():
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}
    training, held_out = problems(100, tasks=["chain_sum"], rows=1000, task_options=options)
    assert 100 < len(training) < 1000 and 0 < len(held_out) <= (len(training) + len(held_out)) / 5


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"tasks": []}, r"data\.tasks is empty.*chain_sum"),
        ({"tasks": ["chain_sums"]}, r"`chain_sums`.*Did you mean `chain_sum`"),
        ({"tasks": ["gcd", "gcd"]}, r"names a task twice"),
        ({"tasks": ["gcd"], "task_options": {"lcm": {}}}, r"data\.task_options\.lcm is set"),
        ({"tasks": ["gcd"], "task_options": {"gcd": {"max_valu": 3}}}, r"max_valu: .*max_value"),
        ({"tasks": ["gcd"], "task_options": {"gcd": {"min_value": -1}}}, r"reasoning-gym refuses"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_a_sentence(settings, words):
    with pytest.raises(ConfigError, match=words):
        problems(**settings)


@pytest.mark.more
def test_every_tasks_own_answer_passes_its_verifier():
    tasks = [*sorted(set(DATASETS) - SLOW), "arc_agi"]
    training, _ = problems(0, tasks=tasks, rows=len(tasks))
    scored = [row for row in training if row["answer"] is not None]
    assert len(scored) > 90
    for row in scored:
        found = reasoning_gym(row["prompt"], row["answer"], row["answer"], row["entry"])
        assert found == 1.0, row["task"]


def test_an_answer_among_other_text_is_worth_something_unless_strict():
    (row,), _ = problems(0, tasks=["chain_sum"], rows=1)
    guesses = " ".join(map(str, range(int(row["answer"]) - 1, int(row["answer"]) + 2)))
    given = {"prompt": "", "answer": row["answer"], "entry": row["entry"]}
    assert 0 < reasoning_gym(response=guesses, **given) < 1
    assert reasoning_gym(response=guesses, strict=True, **given) == 0
    assert reasoning_gym(response=f" {row['answer']}\n", strict=True, **given) == 1


def test_warm_up_learns_what_has_one_answer():
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS)
    config = DataConfig(task="reasoning_gym", tasks=["gcd", "rubiks_cube"], rows=8)
    loaded = load_rows("prompts", config, tokenizer, held_out=4, seed=0)
    assert len(loaded.training) == 8 and len(loaded.examples) == 4
    assert json.loads(loaded.training["entry"][0])["task"] == loaded.training["task"][0]
    config.tasks = ["rubiks_cube"]
    assert load_rows("prompts", config, tokenizer, held_out=4, seed=0).examples is None
    with pytest.raises(ConfigError, match=r"no single right answer"):
        load_rows("examples", config, tokenizer, held_out=4, seed=0)

"""Data sets in the shapes that TRL names, and what its reward functions are then given."""

import inspect

import pyarrow as pa
import pytest
from data_rows import with_template

from hybridrl.config.schema import DataConfig
from hybridrl.data.preference_pairs import tokenize_preference_pairs
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import tokenize_conversations, tokenize_examples
from hybridrl.rewards.signature import (
    check_parameters_in_columns,
    find_call_scope,
    merge_all_rows,
    select_arguments,
)

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return with_template(TEMPLATE)


def said(role, text):
    return [{"role": role, "content": text}]


def of_trl(prompts, completions, completion_ids, trainer_state, ground_truth, **kwargs):
    return [0.0]


def test_prompts_reach_a_function_as_they_stand_in_the_data(tokenizer):
    for prompt, expected in (("1+1=", "1+1="), (said("user", "1"), said("user", "1"))):
        table = pa.Table.from_pylist([{"prompt": prompt, "ground_truth": "2"}])
        batch = tokenize_prompts(RowReader(tokenizer), table, "prompt", None)
        parameters = list(inspect.signature(of_trl).parameters.values())
        check_parameters_in_columns("of_trl", parameters, batch.columns)
        rows = [{**row, "response": "2"} for row in batch.rows_for_users()]
        given = select_arguments(parameters, merge_all_rows(rows))
        answer = "2" if isinstance(prompt, str) else said("assistant", "2")
        assert given["prompts"] == [expected] and given["completions"] == [answer]
        assert given["ground_truth"] == ["2"] and given["trainer_state"].global_step == 0
        assert of_trl(**given) == [0.0]


def test_the_system_prompt_is_no_part_of_what_a_function_sees(tokenizer):
    table = pa.Table.from_pylist([{"prompt": said("user", "1")}])
    batch = tokenize_prompts(
        RowReader(tokenizer, DataConfig(system_prompt="s")), table, "prompt", None
    )
    assert batch["prompt"] == ["s(s)u(1)a("]
    assert batch["prompt_messages"] == [said("user", "1")]


def test_prompt_completion_language_modelling_and_preference(tokenizer):
    def rows(**cells):
        return pa.Table.from_pylist([cells])

    question, answer = said("user", "1+1="), said("assistant", "2")
    plain = tokenize_examples(
        RowReader(tokenizer), rows(prompt="1+1=", completion="2"), "prompt", "completion"
    )
    assert tokenizer.decode(plain["response_ids"].rows()[0].tolist()).startswith("2")
    chat = tokenize_examples(
        RowReader(tokenizer), rows(prompt=question, completion=answer), "prompt", "completion"
    )
    whole = tokenize_conversations(
        RowReader(tokenizer), rows(messages=question + answer), "messages"
    )
    assert chat["response_ids"].values.tolist() == whole["response_ids"].values.tolist()
    pairs = {"chosen": question + answer, "rejected": question + said("assistant", "3")}
    explicit = {"chosen": answer, "rejected": said("assistant", "3"), "prompt": question}
    found = [
        tokenize_preference_pairs(
            RowReader(tokenizer), rows(**cells), "prompt", "chosen", "rejected"
        )
        for cells in (pairs, explicit)
    ]
    assert found[0]["chosen_ids"].values.tolist() == found[1]["chosen_ids"].values.tolist()


def test_what_a_function_is_called_for_follows_from_what_it_names():
    def of(function):
        return find_call_scope(list(inspect.signature(function).parameters.values()))

    assert of(lambda completions, **k: 0) == of(lambda answer, completions: 0) == "rows"
    assert of(lambda completion_ids, **k: 0) == "rows"
    assert of(lambda prompt, responses: 0) == "group"
    assert of(lambda response: 0) == of(lambda **row: 0) == "row"

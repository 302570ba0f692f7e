"""Rows that cannot be read are counted and left out (`data.bad_rows`); others stay aligned."""

import logging
import re

import pytest
from data_rows import with_template, write_rows

from hybridrl.config.schema import DataConfig
from hybridrl.data.datasets import load_eval_prompts, load_rows
from hybridrl.data.refused_rows import collected
from hybridrl.errors import DataError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job_inputs import load_job_rows

GOOD = [{"prompt": f"{n}+1=", "answer": str(n + 1), "kind": n} for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return with_template()


def config_of(folder, rows, **settings):
    settings = {"bad_rows": "drop", "bad_rows_limit": 0.5, **settings}
    return DataConfig(path=write_rows(folder / "rows.jsonl", rows), **settings)


def mixed():
    """Good rows with bad ones among them: numbers 1, 4 and 6."""
    rows = GOOD[:]
    rows[0:0] = [{"prompt": "1+1=", "answer": ""}]
    rows[3:3] = ['{"prompt": "cut of']
    rows[5:5] = [{"prompt": "", "answer": "2"}]
    return rows


def test_bad_rows_are_left_out_and_counted_by_reason(tokenizer, tmp_path, caplog):
    config = config_of(tmp_path, mixed())
    with caplog.at_level(logging.WARNING), collected() as refused:
        rows = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    assert list(rows["prompt"]) == [row["prompt"] for row in GOOD]
    assert list(rows["answer"]) == [row["answer"] for row in GOOD]
    assert list(rows["kind"]) == [row["kind"] for row in GOOD]
    found = refused[0].figures()
    assert (found["rows"], found["left_out"]) == (23, 3)
    assert {reason: part["rows"] for reason, part in found["reasons"].items()} == {
        "without an answer": 1,
        "that are no valid JSON": 1,
        "without text or messages": 1,
    }
    firsts = [part["first"] for part in found["reasons"].values()]
    for word in ("Row 1 of the data", "rows.jsonl, line 4", "Row 6 of the data"):
        assert any(word in first for first in firsts), word
    assert "Left out 3 of the 23 rows" in caplog.text and "1 without an answer" in caplog.text


def test_an_error_names_the_first_row_and_counts_the_others(tokenizer, tmp_path):
    config = config_of(tmp_path, [{"prompt": "1+1=", "answer": ""}, *GOOD, {"prompt": "x" * 3}])
    config.bad_rows = "error"
    with pytest.raises(DataError, match=r"Row 1 of the data has ''.*2 rows are refused of 22"):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)
    config = config_of(tmp_path, [*GOOD, *[{"prompt": "1+1=", "answer": ""}] * 2])
    config.bad_rows = "error"
    words = r"Row 21 of the data has ''.*2 rows are refused of 22: 2 without an answer\. data.bad_"
    with pytest.raises(DataError, match=words):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)


def test_too_many_bad_rows_are_an_error_all_the_same(tokenizer, tmp_path):
    config = config_of(tmp_path, mixed(), bad_rows_limit=0.1)
    words = r"3 of the 23 rows .* more than data.bad_rows_limit=0.1.*1 without an answer.*Row 1 of"
    with pytest.raises(DataError, match=words):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)
    config = config_of(tmp_path, ['{"prompt": '] * 3, bad_rows_limit=0.9)
    with pytest.raises(DataError, match="3 of the 3 rows"):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)


def test_answers_of_another_format_are_bad_rows(tokenizer, tmp_path):
    rows = [{"prompt": f"{n}=", "answer": f"so\n#### {n}"} for n in range(10)]
    rows[2:2] = [{"prompt": "5=", "answer": "no marks"}]
    config = config_of(tmp_path, rows, answer_format="gsm8k")
    found = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    assert list(found["answer"]) == [str(n) for n in range(10)]
    found = load_eval_prompts(config, tokenizer, number=4, seed=0)
    assert len(found) == 4


def test_rows_to_evaluate_on_are_dropped_too(tokenizer, tmp_path):
    config = config_of(tmp_path, GOOD, eval_path=write_rows(tmp_path / "eval.jsonl", mixed()))
    rows = load_rows("prompts", config, tokenizer, held_out=100, seed=0)
    assert list(rows.held_out["prompt"]) == [row["prompt"] for row in GOOD]


def test_pairs_examples_and_conversations_drop_bad_rows(tokenizer, tmp_path):
    def turns(*texts):
        roles = ("user", "assistant") * len(texts)
        return [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]

    good = {"chosen": turns("1+1=", "2"), "rejected": turns("1+1=", "3")}
    parted = {"chosen": turns("1+1=", "2"), "rejected": turns("1+2=", "3")}
    unended = {"chosen": turns("1+1=", "2", "3+"), "rejected": turns("1+1=", "3")}
    config = config_of(tmp_path, [parted, good, unended, good], prompt_column=None)
    with collected() as refused:
        pairs = load_rows("pairs", config, tokenizer, held_out=0, seed=0).training
    assert len(pairs) == 2
    assert set(refused[0].figures()["reasons"]) == {
        "whose responses follow different messages",
        "that do not end with the assistant's message",
    }
    talks = [{"messages": one} for one in (turns("1+1=", "2"), turns("1"), turns("2+1=", "3"))]
    config = config_of(tmp_path, talks, messages_column="messages")
    found = load_rows("examples", config, tokenizer, held_out=0, seed=0).training
    assert [tokenizer.decode(ids) for ids in found["response_ids"].rows()] == ["2<eos>", "3<eos>"]
    said = [{"prompt": "1+1=", "response": "2"}, {"prompt": "", "response": "3"}]
    config = config_of(tmp_path, said)
    assert len(load_rows("examples", config, tokenizer, held_out=0, seed=0).training) == 1


def test_long_rows_are_counted_among_those_that_are_read(tokenizer, tmp_path):
    rows = [*mixed(), {"prompt": "1+" * 20, "answer": "2"}]
    config = config_of(tmp_path, rows, max_prompt_tokens=8)
    with pytest.raises(DataError, match=r"Row 24 of the data .* 1 of 21 rows are too long"):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)
    config.too_long = "drop"
    assert len(load_rows("prompts", config, tokenizer, held_out=0, seed=0).training) == len(GOOD)


def test_mixtures_and_sets_report_what_they_leave_out(tokenizer, tmp_path):
    bad, good = (
        write_rows(tmp_path / "bad.jsonl", mixed()),
        write_rows(tmp_path / "good.jsonl", GOOD),
    )
    config = load_config(
        [
            *("data=mixture", f"data.sources.a.path={bad}", f"data.sources.b.path={good}"),
            *("data.bad_rows=drop", "data.bad_rows_limit=0.5", "eval.prompts=4"),
            *(f"eval.sets.s.data.path={bad}", "model.path=none"),
        ]
    )
    with collected() as refused:
        load_job_rows(config, "prompts", tokenizer)
    assert [(one.place, one.figures()["left_out"]) for one in refused] == [(bad, 3)] * 2
    empty = write_rows(tmp_path / "empty.jsonl", [*GOOD, *[{"prompt": "1+1=", "answer": ""}] * 3])
    source = ["data=mixture", f"data.sources.a.path={empty}"]
    with pytest.raises(DataError, match=r"Source `a`: .*\(3 rows are refused of 23: [^.]*\.\)$"):
        load_job_rows(load_config(source), "prompts", tokenizer)
    with pytest.raises(DataError, match=r"data\.sources\.a\.bad_rows=drop leaves them out"):
        load_job_rows(load_config([*source, "data.bad_rows_limit=0.5"]), "prompts", tokenizer)


def test_a_system_prompt_does_not_mind_rows_that_are_left_out(tokenizer, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{n}="}], "answer": "1"} for n in range(5)]
    config = config_of(tmp_path, [*rows, '{"prompt"', {"prompt": None, "answer": "2"}])
    config.system_prompt = "9"
    found = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    assert [text[:4] for text in found["prompt"]] == ["s-9<"] * 5


def test_the_share_of_bad_rows_is_that_of_all_rows_to_evaluate_on(tokenizer, tmp_path):
    config, bad = config_of(tmp_path, GOOD, bad_rows_limit=0.05), {"prompt": "1+1=", "answer": ""}
    for place in range(len(GOOD)):  # of two rows that are drawn, the bad one would be half
        others = [*GOOD[:place], bad, *GOOD[place:]]
        config.eval_path = write_rows(tmp_path / "eval.jsonl", others)
        assert len(load_rows("prompts", config, tokenizer, held_out=2, seed=0).held_out) == 2


@pytest.mark.parametrize(
    "settings",
    [
        ["data=mixture", "data.sources.a.path={bad}", "data.sources.b.path={good}"],
        ["data=jsonl", "data.path={good}", "eval.sets.s.data.path={bad}"],
        ["data=jsonl", "data.path={good}", "data.eval_path={bad}"],
    ],
)
def test_errors_name_files_as_they_are_called(tokenizer, tmp_path, settings):
    (tmp_path / "data.split").mkdir()
    bad = write_rows(
        tmp_path / "data.split" / "data.jsonl", [*GOOD, '{"prompt": "2+2=" "answer": "4"}']
    )
    places = {"bad": bad, "good": write_rows(tmp_path / "good.jsonl", GOOD)}
    config = load_config(["model.path=none", *(one.format(**places) for one in settings)])
    with pytest.raises(DataError, match=re.escape(f"{bad}, line 21, is no valid JSON")):
        load_job_rows(config, "prompts", tokenizer)

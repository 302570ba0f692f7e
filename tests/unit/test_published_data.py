"""Rows of public data sets in their documented formats, with the obvious settings."""

import base64
import gzip
import json
import logging
import pickle
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import read_rows

from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(kind, tokenizer, path, **settings):
    config = DataConfig(path=str(path), **settings)
    found = load_rows(kind, config, tokenizer, held_out=0, seed=0)
    return found.training


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"Thus $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"so the answer is $\boxed 2$.", "2"),
        (r"First \boxed{1}, then $\boxed 7$", "7"),
        (r"First $\boxed 7$, then $\boxed{1}$", "1"),
        (r"$\boxed{\boxed{5}}$", "5"),
        (r"\boxed{\text{even}}", r"\text{even}"),
    ],
)
def test_math(tokenizer, tmp_path, solution, answer):
    # as in the archive: a file of many lines for each problem, in folders by subject
    row = {"problem": "What is it?", "level": "Level 5", "type": "Algebra", "solution": solution}
    for name in ("algebra", "geometry"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "1.json").write_text(json.dumps(row, indent=4))
    columns = {"prompt_column": "problem", "answer_column": "solution", "answer_format": "boxed"}
    found = load("prompts", tokenizer, tmp_path, **columns)
    assert list(found["answer"]) == [answer] * 2


def test_gsm8k(tokenizer, tmp_path):
    row = {"question": "How many?", "answer": "2+3=<<2+3=5>>5\n#### 1,005"}
    path = write(tmp_path / "train.jsonl", [row])
    found = load("prompts", tokenizer, path, prompt_column="question", answer_format="gsm8k")
    assert list(found["answer"]) == ["1005"]


def test_hh_rlhf(tokenizer, tmp_path):
    def talk(*texts):
        who = ("Human", "Assistant") * len(texts)
        return "".join(f"\n\n{w}: {t}" for w, t in zip(who, texts, strict=False))

    good = {
        "chosen": talk("Hi", "Hello", "Bye", "Bye"),
        "rejected": talk("Hi", "Hello", "Bye", "No"),
    }
    parted = {"chosen": talk("Hi", "Yes", "So", "A"), "rejected": talk("Hi", "No", "So", "B")}
    human = {"chosen": talk("Hi", "Hello", "Bye"), "rejected": talk("Hi", "No")}
    path = write(tmp_path / "train.jsonl", [good] * 8 + [parted, human])
    with pytest.raises(DataError, match=r"Row 9 .*2 rows are refused of 10: 1 whose .*, 1 that do"):
        load("pairs", tokenizer, path, prompt_column=None)
    how = {"bad_rows": "drop", "bad_rows_limit": 0.2}
    assert len(load("pairs", tokenizer, path, prompt_column=None, **how)) == 8


def test_dapo_math(tokenizer, tmp_path):
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": "What is 1+1?"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        }
    ]
    path = write(tmp_path / "dapo-math-17k.parquet", rows)
    found = load("prompts", tokenizer, path, answer_column="reward_model.ground_truth")
    assert list(found["answer"]) == ["34"] and found["extra_info"][0] == {"index": "9a9b6eb4"}


def test_parquet_parts_that_differ(tokenizer, tmp_path, caplog):
    def part(number, **extra):
        row = {"prompt": f"{number}+1=", "answer": str(number + 1), **extra}
        write(tmp_path / f"part-{number}.parquet", [row])

    part(1, extra_info={"index": 1}, level=1, other="x")
    part(2, extra_info={"index": 2, "split": "train"}, level="hard")
    part(3, extra_info={"index": 3, "split": None})
    with caplog.at_level(logging.WARNING):
        found = load("prompts", tokenizer, tmp_path)
    assert list(found["prompt"]) == ["1+1=", "2+1=", "3+1="] and "other" in found.columns
    assert [info["index"] for info in found["extra_info"]] == [1, 2, 3]
    assert "level" not in found.columns and "column `level` is left out" in caplog.text
    part(4, extra_info=None)
    write(tmp_path / "part-5.parquet", [{"prompt": {"text": "1+1="}, "answer": "2"}])
    with pytest.raises(DataError, match=r"Row 5 of .* has {'text': '1.1='} in .* `prompt`"):
        load("prompts", tokenizer, tmp_path)


def test_apps(tokenizer, tmp_path):
    def row(tests):
        found = {"problem_id": 0, "question": "Add.", "solutions": json.dumps(["print(1)"])}
        return found | {"input_output": tests, "difficulty": "easy", "starter_code": ""}

    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    path = write(tmp_path / "train.jsonl", [*[row(tests)] * 4, row("")])
    how = {"prompt_column": "question", "answer_column": None, "answer_format": "apps"}
    found = load("prompts", tokenizer, path, bad_rows="drop", bad_rows_limit=0.2, **how)
    assert json.loads(found["tests"][0]) == [{"input": "1 2\n", "output": "3\n"}]
    assert len(found) == 4


def test_livecodebench(tokenizer, tmp_path, caplog):
    class Planted:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    def row(public, private, name=None, code=""):
        found = {"question_content": "Add.", "starter_code": code, "platform": "x"}
        found |= {"public_test_cases": json.dumps(public), "private_test_cases": private}
        return found | {"metadata": json.dumps({"func_name": name} if name else {})}

    read = {"input": "1\n2\n", "output": "3\n", "testtype": "stdin"}
    called = {"input": '[1, 2]\n"a"', "output": "true", "testtype": "functional"}
    pickled = base64.b64encode(zlib.compress(pickle.dumps(Planted()))).decode()
    rows = [row([read], json.dumps([read])), row([called], pickled, "f", "class Solution:\n ...")]
    path = write(tmp_path / "test.jsonl", rows)
    how = {"prompt_column": "question_content", "answer_column": None}
    with caplog.at_level(logging.WARNING):
        found = load("prompts", tokenizer, path, answer_format="livecodebench", **how)
    stdin = {"input": "1\n2\n", "output": "3\n"}
    assert json.loads(found["tests"][0]) == [stdin, stdin]
    assert json.loads(found["tests"][1]) == ["assert Solution().f([1, 2], 'a') == True"]
    assert not (tmp_path / "opened").exists()
    assert "1 of 2 rows have private tests as compressed pickles" in caplog.text


def test_ultrafeedback(tokenizer, tmp_path):
    def turns(answer):
        return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]

    row = {"prompt": "Hi", "prompt_id": "0", "chosen": turns("Hello"), "rejected": turns("No")}
    row |= {"messages": turns("Hello"), "score_chosen": 8.5, "score_rejected": 3.0}
    path = write(tmp_path / "train_prefs.parquet", [row])
    assert len(load("pairs", tokenizer, path)) == 1
    original = {"source": "x", "instruction": "Hi", "completions": [{"response": "Hello"}]}
    path = write(tmp_path / "original.jsonl", [original] * 3)
    with pytest.raises(DataError, match=r"`chosen`.*completions.*3 rows are refused of 3"):
        load("pairs", tokenizer, path)


@pytest.mark.parametrize("name", ["talks.json", "talks.jsonl", "talks.parquet"])
def test_sharegpt(tokenizer, tmp_path, name):
    talk = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
        {"from": "human", "value": "2+1?"},
        {"from": "gpt", "value": "3"},
    ]
    rows = [{"id": "a", "conversations": talk}] * 3
    rows += [{"id": "b", "conversations": talk[2:]}]  # it begins with the model
    path = write(tmp_path / name, rows)
    how = {"bad_rows": "drop", "bad_rows_limit": 0.3}
    found = load("examples", tokenizer, path, messages_column="conversations", **how)
    messages = [
        {
            "role": {"human": "user", "gpt": "assistant"}.get(m["from"], "system"),
            "content": m["value"],
        }
        for m in talk
    ]
    same = write(tmp_path / "same.jsonl", [{"messages": messages}] * 3)
    expected = load("examples", tokenizer, same, messages_column="messages")
    assert found.to_pylist() == expected.to_pylist()


def test_tables_of_text(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text('prompt,answer,level\n"1,\n+1=",0.50,2\n007=,007,3\n')
    with gzip.open(tmp_path / "b.tsv.gz", "wt") as file:
        file.write("prompt\tanswer\tlevel\n12\t12\t4\n")
    found = load("prompts", tokenizer, tmp_path)
    assert list(found["prompt"]) == ["1,\n+1=", "007=", "12"]
    assert list(found["answer"]) == ["0.50", "007", "12"] and list(found["level"]) == [2, 3, 4]
    (tmp_path / "a.csv").write_text("prompt,answer\n1\n")
    with pytest.raises(DataError, match="no readable CSV file"):
        load("prompts", tokenizer, tmp_path)


def test_arrays_and_values_over_many_lines(tmp_path):
    rows = [{"prompt": f"{n}=", "answer": n} for n in range(3)]
    file = tmp_path / "rows.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        file.write_text(text)
        assert read_rows(str(file)).to_pylist() == rows
    file.write_text(json.dumps(rows[0], indent=2))
    assert read_rows(str(file)).to_pylist() == rows[:1]
    for text, words in (
        ('[{"prompt": "1="},\n {"prompt": }]', "line 2, is no valid JSON"),
        ('[{"prompt": "1="}, 5]', "line 1, holds a JSON number"),
        ('[{"prompt": "1="}', "does not end"),
        ("[]", "no rows"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=words):
            read_rows(str(file))

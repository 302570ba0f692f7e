import json
from dataclasses import replace

import pytest
from data_rows import with_template, write_rows

from hybridrl.config.schema import DataConfig
from hybridrl.data.datasets import check_eval_data_separate, load_rows
from hybridrl.data.duplicates import find_duplicates
from hybridrl.errors import ConfigError, DataError

TASK = DataConfig(task="arithmetic")


@pytest.fixture(scope="module")
def tokenizer():
    return with_template()


def config_of(folder, rows, **settings):
    return DataConfig(path=write_rows(folder / "rows.jsonl", rows), **settings)


def texts(batch, column, tokenizer):
    return [tokenizer.decode(ids) for ids in batch[column].rows()]


def load(kind, config, tokenizer, held_out=100):
    return load_rows(kind, config, tokenizer, held_out=held_out, seed=0)


@pytest.mark.more
def test_the_task_gives_all_three_kinds(tokenizer):
    prompts = load("prompts", TASK, tokenizer)
    examples = load("examples", TASK, tokenizer)
    pairs = load("pairs", TASK, tokenizer)
    for split in (prompts, examples):
        assert (len(split.training), len(split.held_out)) == (1500, 100)
    assert len(pairs.training) > len(pairs.held_out) == 100
    for part in ("training", "held_out"):
        asked = texts(getattr(prompts, part), "prompt_ids", tokenizer)
        assert texts(getattr(examples, part), "prompt_ids", tokenizer) == asked
        assert set(texts(getattr(pairs, part), "prompt_ids", tokenizer)) == set(asked)
    answers = [f"{answer}<eos>" for answer in prompts.training["answer"]]
    assert texts(examples.training, "response_ids", tokenizer) == answers
    assert prompts.examples.to_pylist() == examples.training.to_pylist()


def test_a_task_without_pairs_says_so(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "pairless.py").write_text("CHARACTERS = 'a'\ndef problems(**settings): ...\n")
    (tmp_path / "task_folder").mkdir()
    (tmp_path / "pairless.py").rename(tmp_path / "task_folder" / "pairless.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"`task_folder.pairless`.*no preference pairs.*arithm"):
        load("pairs", DataConfig(task="task_folder.pairless"), tokenizer)


def pairs_of(count):
    return [{"q": f"{n}", "good": "1", "bad": "2"} for n in range(count)]


COLUMNS = {
    "prompt_column": "q",
    "answer_column": None,
    "response_column": "good",
    "chosen_column": "good",
    "rejected_column": "bad",
}


def test_held_out_rows_are_drawn_from_the_whole_file(tokenizer, tmp_path):
    config = config_of(tmp_path, pairs_of(40), **COLUMNS)
    drawn = set()
    for kind in ("prompts", "examples", "pairs"):
        loaded = load(kind, config, tokenizer)
        training = texts(loaded.training, "prompt_ids", tokenizer)
        held_out = texts(loaded.held_out, "prompt_ids", tokenizer)
        assert sorted(training + held_out, key=int) == [str(n) for n in range(40)]
        assert len(held_out) == 8 and held_out == sorted(held_out, key=int)
        drawn.add(tuple(held_out))
        assert len(load(kind, config, tokenizer, held_out=1).held_out) == 1
    (one,) = drawn
    assert min(map(int, one)) < 20, "not the last ones"
    other = load_rows("prompts", config, tokenizer, held_out=8, seed=1).held_out
    assert tuple(texts(other, "prompt_ids", tokenizer)) != one


def test_a_prompt_is_on_one_side_only(tokenizer, tmp_path, caplog):
    rows = [{"prompt": str(n % 7), "answer": str(n)} for n in range(70)]
    for seed in range(5):
        loaded = load_rows("prompts", config_of(tmp_path, rows), tokenizer, held_out=20, seed=seed)
        sides = [set(part["prompt"]) for part in loaded[:2]]
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 7
        assert len(loaded.training) + len(loaded.held_out) == 70 and len(loaded.held_out) == 10
    (said,) = find_duplicates(loaded[0], {"held_out": loaded[1]}, tokenizer).remarks
    assert "54 of the 60 prompts repeat earlier ones, 54 of them with another answer" in said


def test_rows_to_evaluate_on_are_drawn_and_compared(tokenizer, tmp_path, caplog):
    rows = pairs_of(10)
    config = config_of(tmp_path, rows, **COLUMNS)
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[5:] * 2))
    other = replace(config, eval_path=str(tmp_path / "other.jsonl"))
    loaded = load("prompts", other, tokenizer, held_out=3)
    assert len(loaded.held_out) == 3 and len(loaded.training) == 10
    (said,) = find_duplicates(loaded[0], {"held_out": loaded[1]}, tokenizer).remarks
    assert "3 of the 3 held-out prompts are also learned from" in said
    with pytest.raises(ConfigError, match=r"data.eval_path=.* is data.path.*another file\."):
        check_eval_data_separate(replace(config, eval_path=config.path))


def test_errors_of_rows_to_evaluate_on_name_their_setting(tokenizer, tmp_path):
    config = config_of(tmp_path, pairs_of(10), **COLUMNS)
    with pytest.raises(DataError, match=r"`data.eval_path` is `/nowhere.jsonl`"):
        load("prompts", replace(config, eval_path="/nowhere.jsonl"), tokenizer)
    (tmp_path / "other.jsonl").write_text(
        json.dumps({**pairs_of(1)[0], COLUMNS["prompt_column"]: ""})
    )
    with pytest.raises(DataError, match=r"Row 1 of `data.eval_path` has ''"):
        load("prompts", replace(config, eval_path=str(tmp_path / "other.jsonl")), tokenizer)


def test_a_folder_with_splits_is_evaluated_on_its_own(tokenizer, tmp_path, caplog):
    for name, prompt in (("train", "1"), ("test", "2"), ("validation", "3")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    loaded = load("prompts", DataConfig(path=str(tmp_path)), tokenizer)
    assert loaded.training["prompt"] == ["1"] and loaded.held_out["prompt"] == ["3"]
    assert "those of `train` are read" in caplog.text and "split `validation`" in caplog.text
    chosen = DataConfig(path=str(tmp_path), eval_path=str(tmp_path), eval_split="test")
    assert load("prompts", chosen, tokenizer).held_out["prompt"] == ["2"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval_path": "x.jsonl"}, r"data.eval_path=x.jsonl is for data of files"),
        ({"split": "test"}, r"data.split=test is for data of files"),
        (
            {"task": None, "path": "x", "eval_split": "test"},
            r"eval_split=test needs data.eval_path",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(tokenizer, settings, words):
    with pytest.raises(ConfigError, match=words):
        load("prompts", replace(TASK, **settings), tokenizer)


def test_answers_stand_inside_of_objects(tokenizer, tmp_path):
    rows = [{"prompt": str(n), "reward_model": {"ground_truth": n / 2}} for n in range(3)]
    config = config_of(tmp_path, rows, answer_column="reward_model.ground_truth")
    loaded = load("prompts", config, tokenizer).training
    assert loaded["answer"] == ["0.0", "0.5", "1.0"], "as json.dumps has written them"
    assert "reward_model" in loaded.columns and "reward_model.ground_truth" not in loaded.columns


def test_a_file_too_small_to_spare_rows(tokenizer, tmp_path):
    config = config_of(tmp_path, [{"prompt": "a", "response": "b"}] * 4)
    assert load("examples", config, tokenizer).held_out is None


def test_conversations_are_read_from_their_column(tokenizer, tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    config = config_of(tmp_path, [{"talk": talk}], messages_column="talk", system_prompt="be")
    loaded = load("examples", config, tokenizer).training
    assert texts(loaded, "prompt_ids", tokenizer) == ["s-be<eos> u-hi<eos> a-"]
    assert texts(loaded, "response_ids", tokenizer) == ["yes<eos>"]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("prompts", {}, "rows.jsonl, line 1, has no column `answer` .`data.answer_column`.*"
         "If no row has an answer, set data.answer_column=null"),
        ("examples", {}, "rows.jsonl, line 1, has no column `response` .`data.response_column`"),
        ("examples", {"messages_column": "talk"}, "no column `talk` .`data.messages_column`"),
        ("pairs", {}, "rows.jsonl, line 1, has no column `chosen` "
         ".`data.chosen_column`"),
        ("pairs", {"chosen_column": "prompt"}, "no column `rejected` "
         ".`data.rejected_column`"),
        ("pairs", {"chosen_column": "prompt", "rejected_column": "prompt",
                      "margin_column": "by"}, "no column `by` .`data.margin_column`"),
    ],
)  # fmt: skip
def test_missing_columns_name_file_and_setting(tokenizer, tmp_path, kind, settings, message):
    config = config_of(tmp_path, [{"prompt": "a"}], **settings)
    with pytest.raises(DataError, match=message):
        load(kind, config, tokenizer)


def test_only_pairs_do_without_a_prompt_column(tokenizer, tmp_path):
    config = config_of(tmp_path, [{"prompt": "a"}], prompt_column=None)
    for kind in ("prompts", "examples"):
        with pytest.raises(ConfigError, match=r"`data.prompt_column` is null"):
            load(kind, config, tokenizer)


def test_the_length_limits_are_those_of_the_settings(tokenizer, tmp_path):
    rows = [{"prompt": "abc", "response": "b", "chosen": "b", "rejected": "cde"}]
    config = config_of(tmp_path, rows, max_prompt_tokens=2)
    for kind in ("examples", "pairs"):
        with pytest.raises(DataError, match=r"more than `data.max_prompt_tokens` .2"):
            load(kind, config, tokenizer)
    config = replace(config, max_prompt_tokens=9, max_response_tokens=3)
    assert len(load("examples", config, tokenizer).training) == 1
    with pytest.raises(DataError, match=r"more than `data.max_response_tokens` .3"):
        load("pairs", config, tokenizer)

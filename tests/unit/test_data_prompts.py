import logging

import pyarrow as pa
import pytest
from data_rows import with_template

from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% if m.name is defined %}={% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a({% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    return with_template(TEMPLATE)


def tokenize(rows, tokenizer, **settings):
    columns = {"prompt_column": "prompt", "answer_column": None}
    columns |= {n: settings.pop(n) for n in [*columns, "rendered"] if n in settings}
    reader = RowReader(tokenizer, DataConfig(**{"max_prompt_tokens": 100, **settings}))
    return tokenize_prompts(reader, pa.Table.from_pylist(rows), **columns)


def user(text, **further):
    return {"role": "user", "content": text, **further}


def test_strings_are_taken_as_they_are(tokenizer, chat_tokenizer):
    rows = [{"prompt": "1+1=", "answer": 2, "level": 1.5}, {"prompt": "10", "answer": 3}]
    for each in (tokenizer, chat_tokenizer):
        batch = tokenize(rows, each, answer_column="answer")
        assert batch["prompt"] == ["1+1=", "10"]
        assert batch["prompt_ids"].rows()[0].tolist() == tokenizer("1+1=")["input_ids"]
        assert batch["answer"] == ["2", "3"]
        assert tokenize(rows, each)["answer"] == ["", ""]
        assert batch.table["level"].to_pylist() == [1.5, None]


def test_messages_go_through_the_chat_template(chat_tokenizer):
    rows = [
        {"prompt": [user("hi"), {"role": "assistant", "content": "yes"}, user("so", name="x")]},
        {"prompt": [{"role": "system", "content": "own"}, user("b")]},
    ]
    batch = tokenize(rows, chat_tokenizer, system_prompt="be")
    assert batch["prompt"] == ["s(be)u(hi)a(yes)u(so)=a(", "s(own)u(b)a("]
    for text, ids in zip(batch["prompt"], batch["prompt_ids"].rows(), strict=True):
        assert chat_tokenizer.decode(ids) == text


def test_chat_true_wraps_strings(chat_tokenizer):
    assert tokenize([{"prompt": "hi"}], chat_tokenizer, chat=True)["prompt"] == ["u(hi)a("]


def test_further_columns_stay_and_ours_win(tokenizer):
    batch = tokenize([{"question": "1", "prompt": "old"}], tokenizer, prompt_column="question")
    assert batch["prompt"] == ["1"]
    assert batch["question"] == ["1"]


def test_columns_that_the_library_makes_itself_are_left_out_and_named(tokenizer, caplog):
    batch = tokenize([{"prompt": "1", "values": 3, "reward/a": 1, "level": 2}], tokenizer)
    assert set(batch.columns) == {"prompt_ids", "prompt", "answer", "level"}
    assert "columns reward/a, values are left out" in caplog.text and "Rename" in caplog.text


@pytest.mark.parametrize(
    ("rows", "settings", "error", "message"),
    [
        ([{"prompt": [user("a")]}], {}, ConfigError, "has no chat template"),
        ([{"prompt": "a"}], {"chat": True}, ConfigError, "`data.chat` is true, but the tokenizer"),
        ([{"prompt": [user("a")]}], {"chat": False}, DataError, "`data.chat` is false"),
        ([{"prompt": "a"}], {"system_prompt": "b"}, ConfigError, "`data.system_prompt` is set"),
        ([{"prompt": "a"}, {"prompt": None}], {}, DataError, "Row 2 .* has None"),
        ([{"prompt": "a"}, {"prompt": ""}], {}, DataError, "Row 2 .* not empty"),
        ([{"prompt": "a"}], {"prompt_column": "promt"}, DataError, "Did you mean `prompt`"),
        ([{"prompt": "a"}], {"answer_column": "x"}, DataError, "`data.answer_column` is `x`"),
        ([{"prompt": "a"}], {"too_long": "cut"}, ConfigError, "`data.too_long` is `cut`"),
        ([{"prompt": "ab"}, {"prompt": "abcde"}], {"max_prompt_tokens": 4}, DataError,
         "Row 2 .* 5 tokens, more than `data.max_prompt_tokens` .4.; 1 of 2"),
        ([{"prompt": "abc"}], {"max_prompt_tokens": 2, "too_long": "drop"}, DataError,
         "dropped all rows: the shortest prompt has 3"),
    ],
)  # fmt: skip
def test_errors_are_sentences(tokenizer, rows, settings, error, message):
    with pytest.raises(error, match=message):
        tokenize(rows, tokenizer, **settings)


def test_whole_numbers_among_fractions_are_whole(tokenizer):
    rows = [{"prompt": "1", "answer": 0.5}, {"prompt": "2", "answer": 1.0}]
    assert tokenize(rows, tokenizer, answer_column="answer")["answer"] == ["0.5", "1"]


@pytest.mark.parametrize("answer", [None, "", " \n", float("nan"), b"1", "2\0"])
def test_an_answer_that_says_nothing_is_refused(tokenizer, answer):
    rows = [{"prompt": "1", "answer": answer}]
    with pytest.raises(DataError, match=r"Row 1 of the data has .*`data.answer_column`"):
        tokenize(rows, tokenizer, answer_column="answer")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("a"), {"role": "assistant", "content": "b"}], "ends with the assistant's message"),
        ([user(" ")], "last message, of the role `user`, is empty"),
        ([{**user("a"), "role": ""}], "without a role"),
        ([{"role": "system", "content": None}, user("a")], "content is no text: None"),
        ([user([{"type": "image", "text": None}])], "content is no text"),
        ([user("a<eos>b")], "has `<eos>` in the text of a message"),
        ([user("a\0")], "NUL"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(chat_tokenizer, messages, words):
    with pytest.raises(DataError, match=f"Row 1 .*{words}"):
        tokenize([{"prompt": messages}], chat_tokenizer)


def test_content_in_parts_is_their_text(chat_tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokenize([{"prompt": [user(parts)]}], chat_tokenizer)["prompt"] == ["u(ab)a("]


def test_control_tokens_in_strings_are_told_of_unless_all_are_rendered_chats(tokenizer, caplog):
    batch = tokenize([{"prompt": "1<eos>"}], tokenizer)
    assert batch["prompt_ids"].rows()[0].tolist()[-1] == tokenizer.eos_token_id
    assert not caplog.text
    tokenize([{"prompt": "1<eos>"}, {"prompt": "2"}], tokenizer)
    assert "1 of 2 prompts hold control tokens" in caplog.text


def test_chat_messages_must_have_role_and_content(chat_tokenizer):
    with pytest.raises(DataError, match=r"Row 1 .* `role` and `content`"):
        tokenize([{"prompt": [{"text": "a"}]}], chat_tokenizer)


def test_chats_that_are_text_are_told_of(tokenizer, caplog):
    tokenize([{"prompt": '[1, {"role": 2}]'}, {"prompt": "[1"}], tokenizer)
    assert "chats" not in caplog.text
    tokenize([{"prompt": '[{"role": "user", "content": "1+1="}]'}], tokenizer)
    assert "column `prompt` (`data.prompt_column`) holds chats as JSON in texts" in caplog.text


def test_a_template_that_refuses_is_reported_with_its_row(tokenizer):
    picky = build_character_tokenizer()
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses row 1 of the data: roles must alternate"):
        tokenize([{"prompt": [user("a")]}], picky)


def test_too_long_prompts_can_be_dropped(tokenizer, caplog):
    rows = [{"prompt": "abcde", "level": 1}, {"prompt": "ab", "level": 2}]
    with caplog.at_level(logging.WARNING):
        batch = tokenize(rows, tokenizer, max_prompt_tokens=4, too_long="drop")
    assert batch["prompt"] == ["ab"]
    assert batch["level"].tolist() == [2]
    assert "Dropped 1 of 2 prompts" in caplog.text


def test_text_the_tokenizer_does_not_know_is_reported(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        tokenize([{"prompt": "ok"}, {"prompt": "NO"}], tokenizer)
    assert "1 of 2 prompts" in caplog.text

import math

import pyarrow as pa
import pytest
import torch
from data_rows import with_template

from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.preference_pairs import split_pairs_into_samples, tokenize_preference_pairs
from hybridrl.data.row_reader import RowReader
from hybridrl.errors import ConfigError, DataError

PLAIN = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
    {"prompt": "2+2=", "chosen": "4", "rejected": ""},
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    return with_template()


def pairs(rows, tokenizer, prompt_column="prompt", margin_column=None, **settings):
    table = pa.Table.from_pylist(rows)
    return tokenize_preference_pairs(
        *(RowReader(tokenizer, DataConfig(**settings)), table, prompt_column, "chosen", "rejected"),
        margin_column,
    )


def shown(batch, tokenizer):
    columns = [batch[f"{name}_ids"].rows() for name in ("prompt", "chosen", "rejected")]
    return [tuple(map(tokenizer.decode, row)) for row in zip(*columns, strict=True)]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_strings_end_with_the_end_token(tokenizer, chat_tokenizer):
    for each in (tokenizer, chat_tokenizer):
        batch = pairs(PLAIN, each)
        assert batch.columns == ["prompt_ids", "chosen_ids", "rejected_ids", "margin"]
        assert shown(batch, each) == [
            ("1+1=", "2<eos>", "11<eos>"),
            ("2+2=", "4<eos>", "<eos>"),
        ]
        assert batch["margin"].tolist() == [0.0, 0.0]
        assert batch["margin"].dtype == torch.float32


CHAT = ("u-hi<eos> a-", "yes<eos>", "no<eos>")


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, {"chat": True}),
        ({"prompt": [user("hi")], "chosen": "yes", "rejected": "no"}, {}),
        ({"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]}, {}),
        ({"prompt": "hi", "chosen": [assistant("yes")], "rejected": [assistant("no")]}, {}),
        (
            {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
            {"prompt_column": None},
        ),
        ({"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]}, {}),
        (
            {
                "prompt": " hi",
                "chosen": [user("hi"), assistant("yes")],
                "rejected": [user("hi"), assistant("no")],
            },
            {},
        ),
    ],
)
def test_every_way_to_write_a_chat_comes_to_the_same(chat_tokenizer, row, settings):
    assert shown(pairs([row], chat_tokenizer, **settings), chat_tokenizer) == [CHAT]


def test_a_longer_chat_with_a_system_prompt(chat_tokenizer):
    asked = [user("hi"), assistant("yes"), user("so")]
    row = {"chosen": [*asked, assistant("1")], "rejected": [*asked, assistant("2")]}
    batch = pairs([row], chat_tokenizer, None, system_prompt="be")
    prompt = "s-be<eos> u-hi<eos> a-yes<eos> u-so<eos> a-"
    assert shown(batch, chat_tokenizer) == [(prompt, "1<eos>", "2<eos>")]


def test_a_transcript_is_a_chat(chat_tokenizer):
    before = "\n\nHuman: hello\n\nAssistant: yes\n\nHuman: one, two=\n\nAssistant: "
    row = {"chosen": f"{before}good", "rejected": f"{before}\n\nbad\n\nover two lines"}
    (found,) = shown(pairs([row], chat_tokenizer, None), chat_tokenizer)
    asked = "u-hello<eos> a-yes<eos> u-one, two=<eos> a-"
    assert found[:2] == (asked, "good<eos>") and found[2].startswith("bad")
    with pytest.raises(DataError, match="do not tell where the prompt ends"):
        pairs([{"chosen": "no Human: here", "rejected": "b"}], chat_tokenizer, None)


def test_margins_and_pairs_of_equals(tokenizer, caplog):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "by": 2},
        {"prompt": "a", "chosen": "b", "rejected": "b", "by": 1},
        {"prompt": "a", "chosen": "c", "rejected": "d", "by": 3},
    ]
    batch = pairs(rows, tokenizer, margin_column="by")
    assert batch["margin"].tolist() == [2.0, 3.0]
    assert shown(batch, tokenizer)[1] == ("a", "c<eos>", "d<eos>")
    assert "Dropped 1 of 3 pairs" in caplog.text
    with pytest.raises(DataError, match="No pair is left"):
        pairs(rows[1:2], tokenizer)


def test_lengths_are_limited(tokenizer):
    rows = [{"prompt": "abc", "chosen": "a", "rejected": "bcd"}, *PLAIN]
    with pytest.raises(DataError, match=r"Row 2 .* 4 tokens, more than `data.max_prompt_tokens`"):
        pairs(rows, tokenizer, max_prompt_tokens=3)
    with pytest.raises(DataError, match=r"Row 1 .* response of 4 tokens.*data.max_response_tokens"):
        pairs(rows, tokenizer, max_response_tokens=3)
    batch = pairs(rows, tokenizer, max_response_tokens=3, too_long="drop")
    assert [row[0] for row in shown(batch, tokenizer)] == ["1+1=", "2+2="]
    with pytest.raises(DataError, match="No pair is left"):
        pairs(
            rows, tokenizer, max_prompt_tokens=3, max_response_tokens=3, too_long="drop"
        )  # each limit alone leaves some


def test_two_neighbouring_samples_for_each_pair(tokenizer):
    batch = pairs(PLAIN, tokenizer).with_columns({"margin": [1.0, 2.0], "group_id": [7, 8]})
    samples = split_pairs_into_samples(batch)
    assert [tokenizer.decode(row) for row in samples["prompt_ids"].rows()] == [
        *("1+1=", "1+1="),
        *("2+2=", "2+2="),
    ]
    assert [tokenizer.decode(row) for row in samples["response_ids"].rows()] == [
        *("2<eos>", "11<eos>"),
        *("4<eos>", "<eos>"),
    ]
    assert samples["margin"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert samples["group_id"].tolist() == [7, 7, 8, 8]
    assert [row.tolist() for row in samples["response_mask"].rows()] == [
        [1] * 2,
        [1] * 3,
        [1] * 2,
        [1],
    ]
    assert samples["response_mask"].values.dtype == torch.uint8
    part = split_pairs_into_samples(batch.slice(1, 2))
    assert part.to_pylist() == samples.slice(2, 4).to_pylist()


YES, NO = [assistant("yes")], [assistant("no")]
HI = [user("hi")]


@pytest.mark.parametrize(
    ("row", "settings", "error", "message"),
    [
        ({"prompt": "a", "rejected": "c"}, {}, DataError, "`data.chosen_column` is `chosen`"),
        ({"chosen": "b", "rejected": "c"}, {}, DataError, "`data.prompt_column` is `prompt`"),
        ({"chosen": "b", "rejected": "c"}, {"prompt_column": None}, DataError,
         "Row 1 .* strings, .* `data.prompt_column` is null"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, {}, DataError, "Row 1 has 3 in .*rejected"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, {}, DataError, "Row 1 .* not empty"),
        ({"prompt": None, "chosen": "b", "rejected": "c"}, {}, DataError, "Row 1 .* None"),
        ({"prompt": "a", "chosen": YES, "rejected": "c"}, {}, DataError, "write both alike"),
        ({"prompt": "a", "chosen": YES, "rejected": NO}, {"chat": False}, DataError, "is false"),
        ({"prompt": "a", "chosen": [], "rejected": NO}, {}, DataError, r"has \[\] in"),
        ({"prompt": "a", "chosen": HI, "rejected": NO}, {}, DataError, "role `user` .* `chosen`"),
        ({"chosen": HI + YES, "rejected": [user("ha"), *NO]}, {}, DataError, "differ before"),
        ({"chosen": YES, "rejected": NO}, {}, DataError, "Row 1 .* has no prompt"),
        ({"prompt": "ha", "chosen": HI + YES, "rejected": HI + NO}, {}, DataError,
         "Row 1 .* one prompt .*data.prompt_column=null"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"system_prompt": "be"}, ConfigError,
         "`data.system_prompt` is set"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": "x"}, {"margin_column": "by"},
         DataError, "Row 1 .* 'x' .*`data.margin_column`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": math.nan}, {"margin_column": "by"},
         DataError, "Row 1 .* nan .*finite"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"margin_column": "by"}, DataError,
         "`data.margin_column` is `by`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"too_long": "cut"}, ConfigError,
         "`data.too_long` is `cut`"),
    ],
)  # fmt: skip
def test_errors_are_sentences(chat_tokenizer, row, settings, error, message):
    with pytest.raises(error, match=message.replace("Row 1 has", "Row 1 of the data has")):
        pairs([row], chat_tokenizer, **settings)


def test_a_tokenizer_without_template_takes_no_messages(tokenizer):
    with pytest.raises(ConfigError, match="`chosen` holds messages, but the tokenizer"):
        pairs([{"prompt": "a", "chosen": YES, "rejected": NO}], tokenizer)

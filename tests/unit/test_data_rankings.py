"""Rankings as preference pairs, and responses with labels."""

import itertools
import json

import pyarrow as pa
import pytest
import torch
from data_rows import with_template
from settings import configured

from hybridrl.config.schema import DataConfig
from hybridrl.data.datasets import load_rows
from hybridrl.data.labelled_responses import tokenize_labelled_responses
from hybridrl.data.preference_pairs import tokenize_preference_pairs
from hybridrl.data.row_reader import RowReader
from hybridrl.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return with_template()


def ranked(rows, tokenizer, scores=None, **settings):
    table = pa.Table.from_pylist(rows)
    return tokenize_preference_pairs(
        *(
            RowReader(tokenizer, DataConfig(**settings)),
            table,
            "prompt",
            None,
            None,
            None,
            "answers",
            scores,
        )
    )


def shown(batch, tokenizer):
    columns = [batch[f"{name}_ids"].rows() for name in ("prompt", "chosen", "rejected")]
    return [tuple(map(tokenizer.decode, row)) for row in zip(*columns, strict=True)]


def texts(batch, tokenizer):
    return [
        (tokenizer.decode(p), tokenizer.decode(r))
        for p, r in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)
    ]


def said(role, text):
    return [{"role": role, "content": text}]


ROWS = [
    {"prompt": "1+1=", "answers": ["2", "3", "11"], "scores": [0.5, 2.0, 0.5]},
    {"prompt": "2+2=", "answers": ["4", "5"], "scores": [1.0, 1.0]},
    {"prompt": "3+3=", "answers": ["6", "6", "7"], "scores": [3, 2, 1]},
]


def test_a_ranking_is_all_its_pairs(tokenizer, caplog):
    batch = ranked(ROWS, tokenizer)
    expected = [
        (row["prompt"], f"{better}<eos>", f"{worse}<eos>")
        for row in ROWS
        for better, worse in itertools.combinations(row["answers"], 2)
        if better != worse
    ]
    assert shown(batch, tokenizer) == expected and len(batch) == 6
    assert batch["margin"].tolist() == [0.0] * 6
    assert "Dropped 1 of 7 pairs" in caplog.text


def test_scores_order_a_ranking_and_are_its_margins(tokenizer):
    batch = ranked(ROWS, tokenizer, "scores")
    assert shown(batch, tokenizer) == [
        *(("1+1=", "3<eos>", "2<eos>"), ("1+1=", "3<eos>", "11<eos>")),
        *(("3+3=", "6<eos>", "7<eos>"), ("3+3=", "6<eos>", "7<eos>")),
    ]
    assert batch["margin"].tolist() == [1.5, 1.5, 2.0, 1.0]


def test_the_ends_of_a_ranking(tokenizer):
    batch = ranked(ROWS, tokenizer, ranked_pairs="ends")
    assert [row[1:] for row in shown(batch, tokenizer)] == [
        *(("2<eos>", "11<eos>"), ("4<eos>", "5<eos>"), ("6<eos>", "7<eos>")),
    ]
    batch = ranked(ROWS, tokenizer, "scores", ranked_pairs="ends")
    assert batch["margin"].tolist() == [1.5, 2.0], "answers of equal scores are no pair"


def test_a_ranking_of_chats(tokenizer):
    row = {
        "prompt": said("user", "hi"),
        "answers": [said("assistant", "yes"), said("assistant", "no")],
    }
    assert shown(ranked([row], tokenizer), tokenizer) == [("u-hi<eos> a-", "yes<eos>", "no<eos>")]


@pytest.mark.parametrize(
    ("row", "scores", "message"),
    [
        ({"answers": ["2"]}, None, "row 2 .*`answers`.*expected a list of two responses or more"),
        ({"answers": ["2", "3"], "scores": [1.0]}, "scores", "row 2 .*list of 2 finite numbers"),
        ({"answers": ["2", "3"], "scores": None}, "scores", "row 2 .*`scores`.*finite numbers"),
        ({"answers": ["2", "3" * 50]}, None, "row 2 .*has a response of 51 tokens"),
    ],
)
def test_errors_of_rankings_name_the_row(tokenizer, row, scores, message):
    rows = [ROWS[0], {"prompt": "1+2=", **row}]
    with pytest.raises(DataError, match=f"(?i){message}"):
        ranked(rows, tokenizer, scores, max_response_tokens=40)


def test_settings_name_the_columns_of_rankings(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = ["data.ranked_column=answers", "data.scores_column=scores"]
    job = ["algorithm=dpo", "data=jsonl", f"data.path={file}", *columns]
    for which, expected in (("all", [1.5, 1.5, 2.0, 1.0]), ("ends", [1.5, 2.0])):
        config = configured([*job, f"data.ranked_pairs={which}"])
        found = load_rows("pairs", config.data, tokenizer, held_out=0, seed=0).training
        assert found["margin"].tolist() == expected


LABELS = [
    {"prompt": "1+1=", "response": "2", "label": True},
    {"prompt": "1+1=", "response": "", "label": False},
    {"prompt": "2+2=", "response": "5", "label": False},
]


def labelled(rows, tokenizer, **settings):
    reader = RowReader(tokenizer, DataConfig(**settings))
    return tokenize_labelled_responses(
        reader, pa.Table.from_pylist(rows), "prompt", "response", "label"
    )


def test_responses_keep_their_labels(tokenizer):
    batch = labelled(LABELS, tokenizer)
    assert texts(batch, tokenizer) == [("1+1=", "2<eos>"), ("1+1=", "<eos>"), ("2+2=", "5<eos>")]
    assert batch["label"].tolist() == [1.0, 0.0, 0.0] and batch["label"].dtype == torch.float32
    long = [LABELS[0], {**LABELS[1], "response": "3" * 50}, {**LABELS[2], "label": True}]
    assert labelled(long, tokenizer, max_response_tokens=9, too_long="drop")["label"].tolist() == [
        *(1.0, 1.0),
    ]


def test_labels_of_chats_as_trl_writes_them(tokenizer):
    rows = [
        {"prompt": said("user", "hi"), "response": said("assistant", text), "label": text == "yes"}
        for text in ("no", "yes")
    ]
    batch = labelled(rows, tokenizer)
    assert texts(batch, tokenizer) == [("u-hi<eos> a-", "no<eos>"), ("u-hi<eos> a-", "yes<eos>")]
    assert batch["label"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("label", [None, 2, -1, 0.5])
def test_a_label_is_true_or_false(tokenizer, label):
    rows = [{**LABELS[0], "label": 1.0}, {**LABELS[1], "label": label}]
    with pytest.raises(DataError, match=r"(?i)row 2 .*`label`.*expected true or false"):
        labelled(rows, tokenizer)


@pytest.mark.parametrize("kind", ["labels.jsonl", "labels.csv", "pairs.jsonl"])
def test_files_of_labels_and_pairs(tokenizer, tmp_path, kind):
    job = ["algorithm=kto", "data=jsonl", f"data.path={tmp_path / kind}"]
    pairs = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "2", "chosen": "1", "rejected": "0"},
    ]
    if kind == "labels.csv":
        lines = [f"{r['prompt']},{r['response'] or 7},{str(r['label']).lower()}" for r in LABELS]
        text = "\n".join(["prompt,response,label", *lines])
        expected = [1.0, 0.0, 0.0]
    elif kind == "labels.jsonl":
        text = "\n".join(json.dumps(row) for row in LABELS)
        expected = [1.0, 0.0, 0.0]
    else:
        text, expected = "\n".join(json.dumps(row) for row in pairs), [1.0, 0.0, 1.0, 0.0]
        job.append("data.label_column=null")
    (tmp_path / kind).write_text(text)
    found = load_rows("responses", configured(job).data, tokenizer, held_out=0, seed=0).training
    assert found["label"].tolist() == expected
    assert sorted(found.columns) == ["label", "prompt_ids", "response_ids", "response_mask"]
    if kind == "pairs.jsonl":
        assert texts(found, tokenizer)[:2] == [("1+1=", "2<eos>"), ("1+1=", "3<eos>")]


def test_a_task_of_pairs_has_labels(tokenizer):
    config = configured(["algorithm=kto"])
    found = load_rows("responses", config.data, tokenizer, held_out=5, seed=0)
    assert len(found.held_out) == 10 and found.held_out["label"].tolist() == [1.0, 0.0] * 5

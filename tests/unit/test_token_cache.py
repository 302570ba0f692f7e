"""Large data is tokenized in blocks by processes and kept in files, and equals small data."""

import json
import logging

import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.data import row_blocks
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.datasets import load_examples, load_preference_pairs, load_prompts
from hybridrl.data.refused_rows import collected
from hybridrl.data.row_keys import remove_keys
from hybridrl.errors import DataError

LOADERS = {"prompts": load_prompts, "examples": load_examples, "pairs": load_preference_pairs}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}-{{ m.content }}<eos> {% endfor %}"
        "{% if add_generation_prompt %}a-{% endif %}"
    )
    return tokenizer


@pytest.fixture
def in_blocks(monkeypatch, tmp_path):
    """Return a function that loads rows in blocks of a few, or in one go."""

    def load(kind, config, tokenizer, small=False):
        monkeypatch.setattr(row_blocks, "SMALL_BYTES", 1 << 30 if small else 0)
        monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 400)
        return LOADERS[kind](config, tokenizer, held_out=4, seed=0)

    return load


def write(file, rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)


def rows_of(kind, number=60):
    if kind == "prompts":
        return [{"prompt": f"{n % 50}+1=", "answer": n + 1, "kind": n} for n in range(number)]
    if kind == "pairs":
        return [
            {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n + n % 2}"}
            for n in range(number)
        ]
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n}+1="},
                {"role": "assistant", "content": "2"},
            ]
        }
        for n in range(number)
    ]


def settings_of(kind, tmp_path, **more):
    columns = {"messages_column": "messages"} if kind == "examples" else {}
    return DataConfig(
        path=write(tmp_path / "rows.jsonl", rows_of(kind)),
        cache_folder=str(tmp_path / "cache"),
        **{**columns, **more},
    )


def messages_of(caplog):
    found = sorted(record.getMessage() for record in caplog.records)
    caplog.clear()
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_rows_in_blocks_are_those_of_one_table(kind, in_blocks, tokenizer, tmp_path, caplog):
    config = settings_of(kind, tmp_path)
    with caplog.at_level(logging.WARNING):
        small = in_blocks(kind, config, tokenizer, small=True)
        said = messages_of(caplog)
        first = in_blocks(kind, config, tokenizer)
        assert messages_of(caplog) == said
        second = in_blocks(kind, config, tokenizer)
        assert messages_of(caplog) == said
    for found in (first, second):
        assert len(found.training.pieces) > 3
        for mine, expected in zip(found[:2], small[:2], strict=True):
            assert remove_keys(mine).to_pylist() == expected.to_pylist()

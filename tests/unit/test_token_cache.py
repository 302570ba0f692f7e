"""Large data is tokenized in blocks by processes and kept in files, and equals small data."""

import errno
import fcntl
import json
import logging
import os
import pickle
import re
import shutil
import signal
import time
import zlib
from dataclasses import replace
from datetime import date
from decimal import Decimal
from hashlib import blake2b
from itertools import pairwise

import datasets as hub
import numpy as np
import pyarrow as pa
import pytest
from data_rows import with_template, write_rows
from transformers import CTRLTokenizer

from hybridrl.batch.batch import Batch
from hybridrl.checkpoint.run_state import DataIdentity
from hybridrl.cli import main
from hybridrl.config.schema import CacheConfig, DataConfig
from hybridrl.data import datasets, row_blocks, row_keys, token_cache
from hybridrl.data.block_program import BlockProgram, RowRecipe
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.duplicates import find_duplicates
from hybridrl.data.prompt_loader import PromptLoader
from hybridrl.data.refused_rows import collected
from hybridrl.data.row_keys import remove_keys
from hybridrl.data.row_origin import DATA
from hybridrl.errors import DataError, HybridRLError, StorageError
from hybridrl.processes.pool import ItemResult
from hybridrl.system.content_cache import ContentCache

WITH_PROCESSES = (
    "test_processes_make_the_same_rows",
    "test_what_ends_a_process_is_told",
)
KINDS = ("prompts", "examples", "pairs")


@pytest.fixture
def tokenizer():
    return with_template()


class PoolInside:
    """Does what a pool's processes do, in this one."""

    def __init__(self, spec, *_):
        self._program, self._results = BlockProgram(), []
        log = logging.getLogger("hybridrl")
        self._log = log.handlers, log.propagate
        self._program.start(spec.setup, None)

    def submit(self, items):
        for item in items:
            try:
                block = pickle.loads(pickle.dumps(item.payload(0)))
                done = "ok", self._program.run_blocking(block)
            except Exception as error:
                done = self._program.explain(error)
            self._results.append(ItemResult(item.key, *pickle.loads(pickle.dumps(done))))

    def poll(self, wait_s):
        found, self._results = self._results, []
        return found

    def close(self):
        log = logging.getLogger("hybridrl")
        log.handlers, log.propagate = self._log


@pytest.fixture
def load(monkeypatch, tokenizer, request, tmp_path):
    """Load rows in blocks of a few, or in one go."""
    if request.node.originalname not in WITH_PROCESSES:
        monkeypatch.setattr(token_cache, "ProcessPool", PoolInside)
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1500)
    monkeypatch.setattr(token_cache, "count_usable_cores", lambda: 1)

    def load(kind, config, small=False, progress=lambda *_: None):
        monkeypatch.setattr(row_blocks, "SMALL_BYTES", 1 << 30 if small else 0)
        with token_cache.used_by(CacheConfig(folder=str(tmp_path / "cache")), progress):
            return load_rows(kind, config, tokenizer, held_out=4, seed=0)

    return load


@pytest.fixture
def no_processes(monkeypatch):
    """Return a function after whose call no process starts."""

    def refuse(*_):
        raise AssertionError("a process is started")

    return lambda: monkeypatch.setattr(token_cache, "ProcessPool", refuse)


def rows_of(kind, number=90):
    if kind == "prompts":
        rows = [{"prompt": f"{n % 70}+1=", "answer": n + 1, "kind": n} for n in range(number)]
        rows[-1]["weight"] = 0.5  # which blocks before the last one do not have
        return rows
    if kind == "pairs":
        return [
            {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n + n % 2}"}
            for n in range(number)
        ]
    asked = ({"role": "user", "content": f"{n}+1=" + "1+" * (n % 30)} for n in range(number))
    return [{"messages": [one, {"role": "assistant", "content": "2"}]} for one in asked]


def settings_of(kind, folder, rows=None, **more):
    columns = {"messages_column": "messages"} if kind == "examples" else {}
    return DataConfig(
        path=write_rows(folder / "rows.jsonl", rows or rows_of(kind)), **{**columns, **more}
    )


def entries_of(folder):
    return list((folder / "cache" / "rows").iterdir())


def messages_of(caplog):
    found = sorted(record.getMessage() for record in caplog.records)
    caplog.clear()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_blocks_are_those_of_one_table(kind, load, no_processes, tmp_path, caplog):
    rows = rows_of(kind)
    rows[10:10] = ['{"prompt": "cut']
    rows[50:50] = [{}]  # without any column
    rows[60:60] = [{**rows[0], "tools": [{"name": "f"}]}]  # which the template does not show
    how = {"bad_rows": "drop", "too_long": "drop", "max_prompt_tokens": 50}
    config = settings_of(kind, tmp_path, rows, **how)
    with caplog.at_level(logging.WARNING):
        small = load(kind, config, small=True)
        said = messages_of(caplog)
        assert len(said) >= 2
        first = load(kind, config)
        assert messages_of(caplog) == said
        no_processes()
        second = load(kind, config)
        assert messages_of(caplog) == said
    for found in (first, second):
        assert len(found.training.pieces) > 3
        for mine, expected in zip(found[:2], small[:2], strict=True):
            assert remove_keys(mine).to_pylist() == expected.to_pylist()


def test_processes_make_the_same_rows(load, tmp_path):
    config = settings_of("pairs", tmp_path)
    found, expected = load("pairs", config), load("pairs", config, small=True)
    assert remove_keys(found.training).to_pylist() == expected.training.to_pylist()


def test_other_formats_in_blocks_are_those_of_one_table(load, tmp_path):
    table = pa.Table.from_pylist(rows_of("prompts"))
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.csv", "a.arrow"):
        config = DataConfig(path=str(tmp_path / name))
        found, expected = load("prompts", config), load("prompts", config, small=True)
        assert remove_keys(found.training).to_pylist() == expected.training.to_pylist()


def test_a_data_set_of_the_hub_in_blocks_is_that_of_one_table(
    load, monkeypatch, no_processes, tmp_path
):
    def offer(rows, name):
        hub.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        found = hub.load_from_disk(tmp_path / name)
        monkeypatch.setattr(datasets, "find_rows", lambda *_: found)

    config, rows = DataConfig(path="owner/name"), rows_of("prompts", 3000)
    offer(rows, "one")
    expected = load("prompts", config, small=True).training.to_pylist()
    first = load("prompts", config).training
    assert len(first.pieces) > 3
    assert remove_keys(first).to_pylist() == expected
    no_processes()
    assert load("prompts", config).training.to_pylist() == first.to_pylist()
    offer(rows[1:], "other")
    with pytest.raises(AssertionError, match="a process is started"):
        load("prompts", config)


def test_no_rows_and_one_row(load, tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        load("prompts", settings_of("prompts", tmp_path, ["", " "]))
    config = settings_of("prompts", tmp_path, rows_of("prompts", 1))
    rows, expected = load("prompts", config), load("prompts", config, small=True)
    assert remove_keys(rows.training).to_pylist() == expected.training.to_pylist()
    assert len(rows.training) == 1
    assert rows.held_out is None


def test_rows_with_tests_are_read_in_one_table(load, tmp_path):
    rows = [{**row, "tests": "assert f(1) == 2"} for row in rows_of("prompts")]
    config, checked = settings_of("prompts", tmp_path, rows), []
    with collected(lambda settings, table, refused: checked.append(table.num_rows)):
        found = load("prompts", config).training
    assert len(found.pieces) == 1
    assert checked[-1] == len(rows)
    assert entries_of(tmp_path) == []


def test_a_bad_row_is_named_and_all_are_counted(load, no_processes, tmp_path):
    rows = rows_of("prompts")
    for row in rows[7:11] + rows[60:]:
        row["answer"] = None
    rows[45:45] = ['{"prompt"']
    config = settings_of("prompts", tmp_path, rows, bad_rows_limit=0.5)
    said = []
    for small in (True, False):
        with pytest.raises(DataError) as error:
            load("prompts", config, small=small)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert said[0].startswith("Row 8 of the data has None")
    assert "(35 rows are refused of 91: 34 without an answer, 1 that are no valid JSON." in said[0]
    no_processes()
    assert len(load("prompts", replace(config, bad_rows="drop")).training) == 52


def test_a_column_that_a_block_cannot_hold_is_left_out_of_all(load, tmp_path, caplog):
    rows = rows_of("prompts")
    for number, row in enumerate(rows):  # of several blocks each holds one that is too large
        row["extra"] = number if number < 40 or number % 5 else 2**70
    config = settings_of("prompts", tmp_path, rows)
    with caplog.at_level(logging.WARNING):
        expected = load("prompts", config, small=True).training
        said = messages_of(caplog)
        assert len(said) == 1 and "`extra` is left out" in said[0]
        for _ in range(2):
            found = remove_keys(load("prompts", config).training)
            assert messages_of(caplog) == said
            assert found.to_pylist() == expected.to_pylist()


def test_columns_of_users_are_no_keys_of_prompts(load, tmp_path, caplog):
    own = {"conversation": "hello", "conversation_number": 1, "prompt_tokens_key": 2}
    rows = [{**row, **own, "prompt_text_key": "a"} for row in rows_of("prompts")]
    config = settings_of("prompts", tmp_path, rows)
    for small in (True, False):
        found = load("prompts", config, small=small)
        assert len(found.held_out) == 4
        assert found.training.take([0])["conversation"] == ["hello"]
        assert "conversation_number, prompt_text_key, prompt_tokens_key are left out" in caplog.text
        assert "conversation_number" not in found.training
        caplog.clear()


def test_a_column_that_rows_have_by_another_name_stays(load, tmp_path):
    rows = [{"q": f"{n}+1=", "right": n, "answer": 2**70 * (n % 2)} for n in range(90)]
    named = {"prompt_column": "q", "answer_column": "right"}
    config = settings_of("prompts", tmp_path, rows, **named)
    expected, found = (load("prompts", config, small=small).training for small in (True, False))
    assert remove_keys(found).to_pylist() == expected.to_pylist()


def rows_of_both(load, kind, config):
    """Loads rows in one go and in blocks, and returns them if they are the same."""
    expected, found = (load(kind, config, small=small).training for small in (True, False))
    assert len(found.pieces) > 1
    assert remove_keys(found).to_pylist() == expected.to_pylist()
    return expected


MIXED = [([0], [0.5]), ({"a": 1}, {"b": 0.5}), ([0], {"a": "x"}), ([], "x"), (2**70, [{"a": 1}])]


@pytest.mark.parametrize("answers", MIXED)
def test_an_answer_is_the_text_of_its_own_row(answers, load, tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": answers[n >= 45]} for n in range(90)]
    found = rows_of_both(load, "prompts", settings_of("prompts", tmp_path, rows))
    texts = [one if isinstance(one, str) else json.dumps(one) for one in answers]
    assert dict.fromkeys(found["answer"]) == dict.fromkeys(texts)


@pytest.mark.parametrize(
    "values",
    [
        ([], [{"a": 1}]),
        ([{"a": 1}], [None, {"b": 1}]),
        ([None], [{"b": 1}]),
        (2**60, 0.5),
        *MIXED,
    ],
)
def test_further_columns_of_all_blocks_have_one_type(values, load, tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": "1", "more": values[n >= 45]} for n in range(90)]
    rows_of_both(load, "prompts", settings_of("prompts", tmp_path, rows))
    for row in rows[25:65]:  # so that no block has both
        row["more"] = None
    rows_of_both(load, "prompts", settings_of("prompts", tmp_path, rows))


def test_prompts_may_be_texts_and_chats(load, tmp_path):
    rows = [{"q": f"{n}+1=", "answer": "1"} for n in range(90)]
    for row in rows[45:]:
        row["q"] = [{"role": "user", "content": row["q"]}]
    found = rows_of_both(load, "prompts", settings_of("prompts", tmp_path, rows, prompt_column="q"))
    assert {type(one) for one in found["q"]} == {str, list}


@pytest.mark.parametrize(
    "answers",
    [
        (1, "x"),
        (1.0, "x"),
        (True, 2),
        (2**60, 0.5),
        (Decimal("1.50"), "x"),
        ([0], [0.5]),
        ({"a": 1}, {"b": 2}),
        (date(2026, 1, 1), 3),
    ],
)
def test_files_may_have_answers_of_several_types(answers, load, tmp_path):
    for number, answer in enumerate(answers):
        rows = [{"prompt": f"{n}+1=", "answer": answer} for n in range(45)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
    rows_of_both(load, "prompts", DataConfig(path=str(tmp_path)))


def test_a_column_may_be_missing_in_a_block(load, tmp_path):
    rows = rows_of("examples")
    config = settings_of("examples", tmp_path, rows, tools_column="functions")
    for small in (True, False):
        with pytest.raises(DataError, match=r"`data.tools_column` is `functions`, but .* no such"):
            load("examples", config, small=small)
    for row in rows[70:]:
        row["functions"] = [{"name": "f"}]
    rows_of_both(
        load, "examples", settings_of("examples", tmp_path, rows, tools_column="functions")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_a_bad_row(kind, load, tmp_path):
    rows, half = rows_of(kind), "1\ud800"
    key, text = list(rows[0].items())[-1 if kind == "pairs" else 0]
    spoiled = half if isinstance(text, str) else [*text[:-1], {**text[-1], "content": half}]
    rows[45][key] = spoiled
    rows[50]["further"] = half  # which no setting names
    config = settings_of(kind, tmp_path, rows, bad_rows="drop")
    rows_of_both(load, kind, config)
    rows[60]["tools"] = [{"name": half}]
    config = settings_of(kind, tmp_path, rows)
    words = rf"line 46, has half of a surrogate pair.*`{key}`.*\(2 rows are refused of 90"
    for small in (True, False):
        with pytest.raises(DataError, match=words):
            load(kind, config, small=small)


def test_more_bad_rows_than_the_limit_are_an_error(load, tmp_path):
    rows = rows_of("prompts")
    for row in rows[:20]:  # all of the first blocks
        row["answer"] = None
    config = settings_of("prompts", tmp_path, rows, bad_rows="drop", bad_rows_limit=0.1)
    with pytest.raises(DataError, match=r"20 of the 90 rows of .* are refused, more than"):
        load("prompts", config)
    assert (
        len(
            load(
                "prompts",
                settings_of("prompts", tmp_path, rows, bad_rows="drop", bad_rows_limit=0.5),
            ).training
        )
        == 66
    )


def test_rows_that_are_all_too_long_are_an_error(load, tmp_path):
    config = settings_of("examples", tmp_path, too_long="drop", max_prompt_tokens=2)
    with pytest.raises(DataError, match="too_long=drop` dropped all"):
        load("examples", config)


def key_of(config, tokenizer, file):
    recipe = RowRecipe(config, DATA, "p", load_rows, {}, {})
    hashes = ContentCache(CacheConfig(folder=str(file.parent / "cache")), "files")
    content = [token_cache._hash_file(hashes, file, lambda *_: None)]
    return token_cache._compute_key(recipe, tokenizer, content)


def test_what_tokens_depend_on_is_in_the_key(tokenizer, tmp_path):
    file, config = tmp_path / "a.jsonl", DataConfig(path="a", date="2026-01-01")
    file.write_text("abc")
    keys = [key_of(config, tokenizer, file)]
    os.utime(file, (1, 1))
    assert key_of(config, tokenizer, file) == keys[0]
    assert key_of(DataConfig(path="b", date="2026-01-02"), tokenizer, file) == keys[0]
    file.write_text("abd")
    os.utime(file, (2, 2))
    keys.append(key_of(config, tokenizer, file))
    for name in ("a.json", "a.csv", "a.tsv", "a.jsonl.gz"):  # the same bytes, other rows
        renamed = file.with_name(name)
        renamed.write_bytes(file.read_bytes())
        keys.append(key_of(config, tokenizer, renamed))
    for changed in ({"chat": True}, {"system_prompt": "x"}, {"max_prompt_tokens": 9}):
        keys.append(key_of(DataConfig(path="a", **changed), tokenizer, file))
    keys.append(key_of(config, build_character_tokenizer("0123456789"), file))
    for template in ("{{ messages }}", "{{ strftime_now('%d') }}"):
        tokenizer.chat_template = template
        keys.append(key_of(config, tokenizer, file))
    keys.append(key_of(DataConfig(date="2026-01-02"), tokenizer, file))
    assert len(set(keys)) == len(keys) == 13


def test_the_merges_of_a_tokenizer_in_python_are_in_the_key(tmp_path):
    (tmp_path / "a.jsonl").write_text("abc")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<unk>": 2, "ab": 3}))
    keys = []
    for merges in ("a b", "b a"):
        (tmp_path / "merges.txt").write_text(f"#version\n{merges}\n")
        files = [str(tmp_path / name) for name in ("vocab.json", "merges.txt")]
        keys.append(key_of(DataConfig(), CTRLTokenizer(*files), tmp_path / "a.jsonl"))
    assert keys[0] != keys[1]


def notes_of(rows):
    return json.loads(rows.with_name("entry.json").read_text().partition("\n")[2])


@pytest.mark.parametrize("damage", ["flip", "cut", "entry", "place", "gone"])
def test_a_damaged_entry_is_made_again(damage, load, tmp_path, caplog):
    config = settings_of("prompts", tmp_path)
    expected = load("prompts", config).training.to_pylist()
    (rows,) = (tmp_path / "cache").glob("rows/*/rows.arrow")
    data = bytearray(rows.read_bytes())
    if damage == "entry":
        rows.with_name("entry.json").write_text('{"size": 3')
    elif damage == "place":  # it is JSON as before
        entry = rows.with_name("entry.json")
        entry.write_text(re.sub(r'"place": \[\d', '"place": [9', entry.read_text(), count=1))
    elif damage == "gone":
        rows.unlink()
    else:
        size, begin = notes_of(rows)["blocks"][1]["place"]
        data[begin + size // 2] ^= 1
        rows.write_bytes(data[:-9] if damage == "cut" else data)
        os.utime(rows, (1, 1))
    with caplog.at_level(logging.WARNING):
        assert load("prompts", config).training.to_pylist() == expected
    assert "is damaged" in caplog.text


def test_a_copied_entry_is_good(load, no_processes, tmp_path):
    config = settings_of("prompts", tmp_path)
    expected = load("prompts", config).training.to_pylist()
    (rows,) = (tmp_path / "cache").glob("rows/*/rows.arrow")
    os.utime(rows, (1, 1))
    no_processes()
    assert load("prompts", config).training.to_pylist() == expected


@pytest.mark.parametrize("take", [os.rename, shutil.copytree])
def test_an_entry_of_other_rows_is_made_again(take, load, tmp_path):
    config = settings_of("prompts", tmp_path)
    load("prompts", config)
    (other,) = entries_of(tmp_path)
    config = settings_of("prompts", tmp_path, rows_of("prompts", 60))
    expected = load("prompts", config).training.to_pylist()
    (mine,) = (one for one in entries_of(tmp_path) if one != other)
    shutil.rmtree(mine)
    take(other, mine)
    assert load("prompts", config).training.to_pylist() == expected


def test_a_file_of_another_format_has_other_rows(load, tmp_path):
    file = tmp_path / "rows.csv"
    lines = [f"a\t1{n}=\t{n}\tb,2{n}=,{n},c\n" for n in range(40)]
    file.write_text("".join(["x\tprompt\tanswer\ty,prompt,answer,z\n", *lines]))
    assert load("prompts", DataConfig(path=str(file))).training["prompt"][0][0] == "2"
    file = file.rename(tmp_path / "rows.tsv")
    assert load("prompts", DataConfig(path=str(file))).training["prompt"][0][0] == "1"


def test_two_jobs_that_fill_the_cache_at_once_agree(load, monkeypatch, tmp_path):
    config, found = settings_of("prompts", tmp_path), []
    fill = token_cache._fill

    def fill_twice(*given):
        monkeypatch.setattr(token_cache, "_fill", fill)
        found.append(load("prompts", config).training)  # the other job, which is quicker
        return fill(*given)

    monkeypatch.setattr(token_cache, "_fill", fill_twice)
    found.append(load("prompts", config).training)
    assert found[0].to_pylist() == found[1].to_pylist()
    assert len(entries_of(tmp_path)) == 1


def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.more
def test_what_ends_a_process_is_told(load, monkeypatch, tmp_path):
    config = settings_of("prompts", tmp_path)
    monkeypatch.setattr(datasets, "tokenize_prompts", kill)
    with pytest.raises(HybridRLError, match=r"from row 1 on could not be tokenized.*SIGKILL"):
        load("prompts", config)
    assert entries_of(tmp_path) == []


def test_a_full_disk_is_told(load, monkeypatch, tmp_path):
    def fill_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config = settings_of("prompts", tmp_path)
    monkeypatch.setattr(os, "fsync", fill_disk)
    with pytest.raises(StorageError, match=r"disk is full.*cache\.folder"):
        load("prompts", config)
    assert entries_of(tmp_path) == []


def test_what_progress_raises_ends_it(load, tmp_path):
    told = []

    def end(*given):
        told.append(given)
        if len(told) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("examples", settings_of("examples", tmp_path), progress=end)
    assert told[0] == ("reading rows.jsonl",)
    assert told[1] == (f"tokenizing {tmp_path / 'rows.jsonl'} (MiB)", 0, 1)
    assert entries_of(tmp_path) == []


def test_what_no_job_opens_is_removed(load, tmp_path):
    folder = tmp_path / "cache" / "rows"
    load("prompts", settings_of("prompts", tmp_path))
    (used,) = entries_of(tmp_path)
    names = "another", ".part-killed", ".part-busy"
    for name, days in zip(names, (31, 2, 0), strict=True):
        (folder / name).mkdir()
        seconds = time.time() - days * 86400
        os.utime(folder / name, (seconds, seconds))
    os.utime(used, (1, 1))
    long = folder / ".part-of-days" / "entry"
    long.mkdir(parents=True)
    with (long / "rows.arrow").open("wb") as rows:
        fcntl.flock(rows, fcntl.LOCK_EX)
        for place in (long, long.parent):
            os.utime(place, (1, 1))
        load("pairs", settings_of("pairs", tmp_path))
    assert not used.exists()
    kept = {place.name for place in entries_of(tmp_path)}
    assert len(kept) == 3 and {".part-busy", ".part-of-days"} < kept


@pytest.mark.parametrize(("cores", "blocks", "count"), [(8, 3, 3), (2, 5, 2), (4, 0, 1)])
def test_no_process_starts_that_has_nothing_to_do(
    cores, blocks, count, load, monkeypatch, tmp_path
):
    started = []

    class CountingPool(PoolInside):
        def __init__(self, spec, count, *_):
            started.append(count)
            super().__init__(spec)

    config = settings_of("examples", tmp_path)
    monkeypatch.setattr(token_cache, "ProcessPool", CountingPool)
    monkeypatch.setattr(token_cache, "count_usable_cores", lambda: cores)
    size = (tmp_path / "rows.jsonl").stat().st_size
    monkeypatch.setattr(token_cache, "BLOCK_BYTES", size // blocks if blocks else 2 * size)
    load("examples", config)
    assert started == [count]


def in_pieces(batch, *ends):
    bounds = [0, *ends, len(batch)]
    parts = [batch.table.slice(a, b - a) for a, b in pairwise(bounds)]
    return Batch(pa.concat_tables(parts))


def test_rows_in_pieces_are_read_as_one_table(tokenizer):
    random = np.random.default_rng(0)
    ids = [random.integers(0, 40, n) for n in random.integers(1, 9, 500)]
    whole = Batch.from_columns({"prompt_ids": ids, "answer": [str(n) for n in range(500)]})
    parts = in_pieces(whole, 3, 3, 200, 201)
    rows = random.integers(0, 500, 64)
    for chosen in (rows, [], [4], range(10, 400), np.delete(np.arange(500), [7, 300]), [499, 0]):
        assert parts.take(chosen).to_pylist() == whole.take(chosen).to_pylist()
    assert parts.lengths("prompt_ids").tolist() == whole.lengths("prompt_ids").tolist()
    states = [PromptLoader(rows, 8, seed=0).state() for rows in (whole, parts)]
    assert states[0] == states[1]
    rows_keys = [
        blake2b(blake2b(row.tobytes(), digest_size=8).digest(), digest_size=8) for row in ids
    ]
    assert states[0]["rows_crc32"] == zlib.crc32(b"".join(key.digest() for key in rows_keys))
    assert DataIdentity(parts, tokenizer).fingerprint == DataIdentity(whole, tokenizer).fingerprint
    assert find_duplicates(parts, {}, tokenizer) == find_duplicates(whole, {}, tokenizer)


def test_mapped_rows_take_no_memory(load, tmp_path):
    config = settings_of("examples", tmp_path, rows_of("examples", 3000))
    load("examples", config)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        rows = remove_keys(load("examples", config).training)
        rows.take(range(0, 3000, 97))
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 0.05 * rows.nbytes


def test_a_checkpoint_reads_no_tokens_of_the_cache(load, tmp_path, monkeypatch):
    config = settings_of("examples", tmp_path, rows_of("examples", 300))
    load("examples", config)
    mapped = load("examples", config).training
    expected = PromptLoader(remove_keys(mapped), 16, seed=0).state()
    monkeypatch.setattr(row_keys, "_hash_tokens", lambda *_: pytest.fail("reads all tokens"))
    assert PromptLoader(mapped, 16, seed=0).state() == expected
    part = PromptLoader(mapped.take([*range(200), *range(201, len(mapped))]), 16, seed=0).state()
    assert part["rows_crc32"] != expected["rows_crc32"]


def test_epochs_continue_in_the_middle_of_the_second(load, tmp_path):
    config = settings_of("examples", tmp_path)
    rows = load("examples", config).training
    loader = PromptLoader(rows, 16, seed=3)
    for _ in range(8):  # of 86 rows
        next(loader)
    assert 1 < loader.epoch < 2
    other = PromptLoader(load("examples", config).training, 16, seed=3)
    other.restore(loader.state())
    for _ in range(10):
        assert next(other).to_pylist() == next(loader).to_pylist()


def test_the_command_lists_and_prunes_token_ids(load, tokenizer, tmp_path, capsys):
    folder, used = tmp_path / "cache", {}
    for name in ("old", "new"):
        rows = [{"prompt": f"{name} {n}", "answer": str(n)} for n in range(40)]
        before = set((folder / "rows").glob("*"))
        load("prompts", DataConfig(path=write_rows(tmp_path / f"{name}.jsonl", rows)))
        (used[name],) = set((folder / "rows").glob("*")) - before
    ContentCache(CacheConfig(folder=str(folder)), "verdicts").put_many({bytes(32): b"value"})
    for age, path in enumerate([used["new"], *folder.glob("verdicts/*"), used["old"]]):
        os.utime(path, (time.time() - 3600 * age,) * 2)
    part, killed = (folder / "rows" / f".part-{name}" for name in ("of-another-job", "killed"))
    for path in (part / "entry", killed / "entry"):
        path.mkdir(parents=True)
        (path / "rows.arrow").write_bytes(bytes(1000))
    busy = (part / "entry" / "rows.arrow").open("rb")
    fcntl.flock(busy, fcntl.LOCK_EX)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["cache", "--folder", str(folder), *arguments])
        assert end.value.code == 0
        return dict(re.findall(r"(\w+) +│ +([\d,]+) +│", capsys.readouterr().out))

    assert run() == {"files": "2", "verdicts": "1", "rows": "3"}
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    total -= 1000  # of the job that still runs
    assert run("--prune", str(total / 2**30))["rows"] == "3"
    assert run("--prune", str((total - 1) / 2**30))["rows"] == "2" and not killed.exists()
    total -= 1000
    assert run("--prune", str((total - 1) / 2**30))["rows"] == "1"
    assert used["new"].exists() and not used["old"].exists()
    assert run("--prune", "0") == {} and part.exists()
    busy.close()
    assert run() == {"rows": "1"}
    os.utime(part, (0, 0))
    assert run("--prune", "1") == {} and not part.exists()

import gzip
import json
import sys
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import read_rows

from hybridrl.batch.arrow_columns import python_values
from hybridrl.data.data_files import list_splits
from hybridrl.errors import DataError, MissingPackageError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "level": 3}]
REQUIRED = {"data.prompt_column": "prompt", "data.answer_column": "answer"}


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
def test_json_lines(tmp_path, name):
    table = read_rows(write_lines(tmp_path / name, ROWS), required=REQUIRED)
    assert table.to_pylist() == [{**ROWS[0], "level": None}, ROWS[1]]


def test_byte_order_mark_and_empty_lines_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')
    assert read_rows(str(path))["prompt"].to_pylist() == ["a", "b"]


def test_parquet_file_folder_and_glob(tmp_path):
    for number in (1, 2):
        table = pa.table({"prompt": [f"p{number}"], f"only_{number}": [number]})
        pq.write_table(table, tmp_path / f"train-{number}.parquet")
    assert read_rows(str(tmp_path / "train-1.parquet")).num_rows == 1
    for path in (str(tmp_path), str(tmp_path / "*.parquet")):
        assert read_rows(path)["prompt"].to_pylist() == ["p1", "p2"]


def test_a_folder_may_have_brackets_in_its_name(tmp_path):
    folder = tmp_path / "run[1]*"
    write_lines(folder / "train.jsonl", [{"prompt": "a"}])
    write_lines(folder / "test.jsonl", [{"prompt": "b"}])
    write_lines(tmp_path / "run1" / "train.jsonl", [{"prompt": "another"}])
    assert list_splits(str(folder)) == ["train", "test"]
    for path in (folder, folder / "tr*.jsonl", folder / "train.jsonl"):
        assert read_rows(str(path))["prompt"].to_pylist() == ["a"]


def test_split_chooses_files_of_a_folder(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a"}])
    write_lines(tmp_path / "test.jsonl", [{"prompt": "b"}])
    write_lines(tmp_path / "test" / "more.jsonl", [{"prompt": "c"}])
    assert read_rows(str(tmp_path), "train")["prompt"].to_pylist() == ["a"]
    assert sorted(read_rows(str(tmp_path), "test")["prompt"].to_pylist()) == ["b", "c"]
    assert read_rows(str(tmp_path))["prompt"].to_pylist() == ["a"]
    assert list_splits(str(tmp_path)) == ["train", "test"]
    with pytest.raises(DataError, match=r"`data.split` is `dev`.*train.jsonl"):
        read_rows(str(tmp_path), "dev")
    with pytest.raises(DataError, match=r"data.split=null"):
        read_rows(str(tmp_path / "train.jsonl"), "train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", ', r"line 3, is no valid JSON: .*\(column \d+\)"),
        ("[1, 2]", "line 3, holds a JSON array, expected an object"),
        ('{"promt": "x", "answer": "y"}', "line 3, has no column `prompt` .`data.prompt_column`.*"
         "Did you mean `promt`"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.jsonl").open("a").write(line + "\n")
    with pytest.raises(DataError, match=f"rows.jsonl, {message}"):
        read_rows(path, required=REQUIRED)


def test_a_folder_of_several_splits_without_one_to_learn_from_asks(tmp_path):
    for name in ("validation", "test"):
        write_lines(tmp_path / f"{name}.jsonl", ROWS)
    with pytest.raises(DataError, match=r"several splits \(validation, test\).*data.split=valid"):
        read_rows(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "é"}'.encode("latin-1"), "no text in UTF-8 .*Save the file as UTF-8"),
        (gzip.compress(b"{}", mtime=0), r"compressed by gzip: name it `rows.jsonl.gz`"),
        (b"prompt,answer\n1,2", r"begins with 'prompt,answer'; a line is one object"),
    ],
)
def test_a_file_of_another_kind_is_told_what_it_should_be(tmp_path, content, words):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_rows(str(tmp_path / "rows.jsonl"))


def test_several_paths_in_one_get_a_hint():
    with pytest.raises(DataError, match="Several files are named by their folder, or by a glob"):
        read_rows("[a.jsonl,b.jsonl]")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "meta": {"a": 1, "a": 2}}')
    with pytest.raises(
        DataError, match=r"line 1, is no valid JSON: the key 'a' stands there twice"
    ):
        read_rows(str(tmp_path / "rows.jsonl"))


def test_numbers_are_read_as_texts_as_they_are_written(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"n": 0.50}\n{"n": 1}\n{"n": true}\n{"n": "x"}\n')
    table = read_rows(str(tmp_path / "rows.jsonl"), named={"n": True})
    assert table["n"].to_pylist() == ["0.50", "1", "true", "x"]
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": NaN}\n')
    with pytest.raises(DataError, match=r"line 2, has nan in the column `n`"):
        read_rows(str(tmp_path / "rows.jsonl"), named={"n": True})


def test_dots_lead_into_objects(tmp_path):
    rows = [{"prompt": "x", "meta": {"truth": {"text": str(n)}}} for n in range(2)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    write_lines(tmp_path / "rows.jsonl", rows)
    for name in ("rows.parquet", "rows.jsonl"):
        required = {"data.answer_column": "meta.truth.text"}
        table = read_rows(str(tmp_path / name), required=required)
        assert table["meta.truth.text"].to_pylist() == ["0", "1"]
        with pytest.raises(DataError, match=r"no column `meta.text`"):
            read_rows(str(tmp_path / name), required={"data.answer_column": "meta.text"})


def test_only_a_column_that_is_named_may_be_of_several_types(tmp_path, caplog):
    rows = [{"prompt": "x", "level": 1}, {"prompt": "y", "level": "hard"}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert read_rows(path).column_names == ["prompt"]
    assert "`level` is left out" in caplog.text and "line 2, has 'hard'" in caplog.text
    table = read_rows(path, required={"eval.by_column": "level"})
    assert python_values(table["level"]) == [1, "hard"]


def test_what_is_no_character_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "\\ud800"}')
    with pytest.raises(DataError, match=r"line 1, has half of a surrogate pair.*prompt.*ud800"):
        read_rows(str(path), required={"data.prompt_column": "prompt"})
    path.write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}')
    assert read_rows(str(path))["prompt"].to_pylist() == ["\U0001f600 \\ud800"]


def test_missing_column_of_parquet_names_the_nearest(tmp_path):
    pq.write_table(pa.table({"question": ["x"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"`data.prompt_column`.*Did you mean `question`"):
        read_rows(str(tmp_path), required={"data.prompt_column": "questions"})


@pytest.mark.parametrize("name", ["absent.jsonl", "absent/*.parquet", "./absent"])
def test_a_missing_path_names_the_setting(name):
    with pytest.raises(DataError, match=r"`data.path` is `.*absent"):
        read_rows(name)


def test_files_without_rows_or_sense(tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(write_lines(tmp_path / "empty.jsonl", []))
    (tmp_path / "rows.txt").write_text("{}")
    with pytest.raises(DataError, match="by its name no file of rows"):
        read_rows(str(tmp_path / "rows.txt"))
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"broken.parquet.*no readable Parquet"):
        read_rows(str(tmp_path / "broken.parquet"))
    (tmp_path / "broken.jsonl.gz").write_text("no gzip")
    with pytest.raises(DataError, match=r"broken.jsonl.gz.*cannot be read"):
        read_rows(str(tmp_path / "broken.jsonl.gz"))
    with pytest.raises(DataError, match="files of different formats"):
        read_rows(str(tmp_path))


def fake_datasets(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("hybridrl.data.data_files.find_hub_problem", lambda *_: None)


def test_a_name_that_is_no_file_is_a_hub_data_set(monkeypatch):
    asked = []

    class Dataset:
        def with_format(self, kind):
            return self

        def __getitem__(self, rows):
            return pa.table({"prompt": ["x", "y"]})[rows]

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return Dataset()

    fake_datasets(monkeypatch, load_dataset)
    assert read_rows("openai/gsm8k:main").num_rows == 2
    assert read_rows("gsm8k", "test[:1%]").num_rows == 2
    assert asked == [("openai/gsm8k", "main", "train"), ("gsm8k", None, "test[:1%]")]


def test_a_real_data_set_object_becomes_a_table(monkeypatch):
    datasets = pytest.importorskip("datasets")
    real = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]}).select([2, 0])
    fake_datasets(monkeypatch, lambda *names, split: real)
    assert read_rows("owner/name")["prompt"].to_pylist() == ["c", "a"]


def test_hub_failures_are_sentences(monkeypatch):
    def load_dataset(*names, split):
        raise ConnectionError("no route")

    fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=r"`owner/name`.*ConnectionError: no route"):
        read_rows("owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install 'datasets"):
        read_rows("owner/name")


def test_folders_that_save_to_disk_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    parts = {"train": rows, "test": rows.select([0])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "parts")
    expected = rows.to_list()
    assert read_rows(str(tmp_path / "one"), required=REQUIRED).to_pylist() == expected
    assert read_rows(str(tmp_path / "parts")).to_pylist() == expected
    assert read_rows(str(tmp_path / "parts"), "test").to_pylist() == expected[:1]
    (file, _) = sorted((tmp_path / "one").glob("*.arrow"))
    assert read_rows(str(file)).to_pylist() == expected[:1]
    with pytest.raises(DataError, match=r"`data.split` is `dev`.*train"):
        read_rows(str(tmp_path / "parts"), "dev")


@pytest.mark.parametrize("end", ["arrow", "parquet"])
def test_views_are_read_as_texts(tmp_path, end):
    """Polars writes texts so."""
    chats = pa.list_(pa.struct([("role", pa.string_view()), ("bytes", pa.binary_view())]))
    kinds = {"prompt": pa.string_view(), "answer": pa.string_view(), "chat": chats, "n": pa.int8()}
    rows = [{**row, "chat": [{"role": "user", "bytes": b"a"}], "n": 1} for row in ROWS]
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    if end == "parquet":
        table = table.drop_columns("chat")  # which Arrow cannot write there
        pq.write_table(table, tmp_path / "rows.parquet")
    else:
        with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
            writer.write_table(table)
    found = read_rows(str(tmp_path / f"rows.{end}"), required=REQUIRED)
    assert found.take([1, 0]).to_pylist() == table.to_pylist()[::-1]


def test_arrow_files_of_both_kinds(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    for name, make in (("s.arrow", pa.ipc.new_stream), ("f.arrow", pa.ipc.new_file)):
        with make(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
        assert read_rows(str(tmp_path / name), required=REQUIRED).to_pylist() == table.to_pylist()
    (tmp_path / "bad.arrow").write_text("no arrow")
    with pytest.raises(DataError, match=r"bad.arrow.*no readable Arrow file"):
        read_rows(str(tmp_path / "bad.arrow"))

"""Batch: ragged columns in and out, rows moved like Python lists, and nothing copied unasked."""

import copy
import io
import itertools
import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.batch import Batch, RaggedColumn, resolve_row_numbers
from hybridrl.errors import DataError

TOKENS = st.lists(st.integers(-5, 5), max_size=4)
ROWS = st.fixed_dictionaries(
    {"ids": TOKENS, "score": st.floats(-1, 1, width=32), "text": st.text(max_size=3)}
)


def make(rows):
    """A batch of dictionaries as `ROWS` draws them; typed also where there are none."""
    return Batch.from_columns(
        {
            "ids": RaggedColumn(
                torch.tensor(
                    list(itertools.chain(*(row["ids"] for row in rows))), dtype=torch.int64
                ),
                torch.tensor([0, *itertools.accumulate(len(row["ids"]) for row in rows)]),
            ),
            "score": torch.tensor([row["score"] for row in rows], dtype=torch.float32),
            "text": pa.array([row["text"] for row in rows], type=pa.string()),
        }
    )


def numbered(rows, width=3):
    return Batch.from_columns(
        {
            "ids": [torch.arange(row, row + row % (width + 1)) for row in range(rows)],
            "number": torch.arange(rows),
            "text": [f"row {row}" for row in range(rows)],
        }
    )


def out_of_band(value):
    """Pickles as a zero-copy transport does; returns the bytes in band and the buffers beside."""
    buffers = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, buffers


def test_every_kind_of_ragged_input_gives_the_same_column():
    rows = [[1, 2, 3], [], [4]]
    values, cu_seqlens = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 3, 4])
    for column in (
        rows,
        [torch.tensor(row, dtype=torch.int64) for row in rows],
        [np.asarray(row, dtype=np.int64) for row in rows],
        RaggedColumn(values, cu_seqlens),
        RaggedColumn(values, cu_seqlens.int()),
    ):
        ragged = Batch.from_columns({"ids": column})["ids"]
        assert ragged.values.tolist() == [1, 2, 3, 4] and ragged.values.dtype == torch.int64
        assert ragged.cu_seqlens.tolist() == [0, 3, 3, 4]
        assert ragged.lengths.tolist() == [3, 0, 1]
        assert [row.tolist() for row in ragged.rows()] == rows


def test_offsets_that_do_not_begin_at_zero():
    values = torch.arange(10)
    batch = Batch.from_columns({"ids": RaggedColumn(values, torch.tensor([2, 5, 5, 8]))})
    assert batch["ids"].values.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch["ids"].cu_seqlens.tolist() == [0, 3, 3, 6]
    assert batch.slice(1, 3)["ids"].cu_seqlens.tolist() == [0, 0, 3]
    assert batch.slice(1, 3)["ids"].values.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.int64, torch.int64),
        (torch.int32, torch.int32),
        (torch.uint8, torch.uint8),
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.bool, torch.uint8),
    ],
)
def test_precisions(dtype, stored):
    column = torch.tensor([0, 1, 1]).to(dtype)
    batch = Batch.from_columns({"one": column, "many": [column, column[:0], column]})
    assert batch["one"].dtype == batch["many"].values.dtype == stored
    assert torch.equal(batch["one"], column.to(stored))
    assert torch.equal(batch["many"].rows()[2], column.to(stored))


def test_tensors_that_carry_a_gradient_lose_it():
    assert not Batch.from_columns({"x": torch.ones(2, requires_grad=True)})["x"].requires_grad


def test_python_lists_of_numbers():
    batch = Batch.from_columns({"a": [1, 2], "b": [0.5, math.nan], "c": [[1, 2.5], []]})
    assert batch["a"].tolist() == [1, 2] and batch["a"].dtype == torch.int64
    assert batch["b"][1].isnan()
    assert batch["c"].values.dtype == torch.float32 and batch["c"].lengths.tolist() == [2, 0]


def test_text_structs_and_lists_of_text_come_back_as_python():
    columns = {
        "text": ["", "é🙂", None],
        "info": [{"a": 1, "b": "x"}, {"a": 2, "b": None}, None],
        "tags": [["a"], [], ["b", "c"]],
        "truth": [True, False, True],
    }
    batch = Batch.from_columns(columns)
    assert {name: batch[name] for name in columns} == columns
    turned = batch.take([2, 0])
    assert {name: turned[name] for name in columns} == {
        name: [values[2], values[0]] for name, values in columns.items()
    }
    assert Batch.concat([batch, turned])["info"] == columns["info"] + turned["info"]


def test_numeric_columns_are_views():
    scores, ids = torch.arange(6.0), torch.arange(12)
    batch = Batch.from_columns({"scores": scores, "ids": RaggedColumn(ids, torch.arange(0, 13, 2))})
    assert batch["scores"].data_ptr() == scores.data_ptr()
    assert batch["ids"].values.data_ptr() == ids.data_ptr()
    part = batch.slice(2, 5)
    assert part["scores"].data_ptr() == scores[2:].data_ptr()
    assert part["ids"].values.data_ptr() == ids[4:].data_ptr()
    assert batch.take([2, 3, 4])["ids"].values.data_ptr() == ids[4:].data_ptr()
    joined = batch | Batch.from_columns({"more": scores})
    assert joined["scores"].data_ptr() == joined["more"].data_ptr() == scores.data_ptr()
    assert batch.select(["ids"])["ids"].values.data_ptr() == ids.data_ptr()


def test_padded():
    batch = Batch.from_columns({"ids": [[7, 8], [], [9]]})
    dense, mask = batch.padded("ids", fill=-1)
    assert dense.tolist() == [[7, 8], [-1, -1], [9, -1]]
    assert mask.tolist() == [[True, True], [False, False], [True, False]]
    dense, mask = batch.slice(2, 3).padded("ids")
    assert dense.tolist() == [[9]] and mask.tolist() == [[True]]
    assert batch.slice(0, 0).padded("ids")[0].shape == (0, 0)


@pytest.mark.more
@given(st.lists(ROWS, max_size=6), st.data())
def test_rows_move_as_those_of_a_list(rows, data):
    batch = make(rows)
    assert batch.to_pylist() == rows
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    batch, rows = batch.slice(start, stop), rows[start:stop]
    assert len(batch) == len(rows) and batch.to_pylist() == rows
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    taken = batch.take(chosen)
    assert taken.to_pylist() == [rows[row] for row in chosen]
    twice = Batch.concat([batch, taken, batch.slice(0, 0)])
    assert twice.to_pylist() == rows + [rows[row] for row in chosen]
    cut = data.draw(st.integers(0, len(twice)))
    again = Batch.concat([twice.slice(0, cut), twice.slice(cut, len(twice))])
    for name in ("ids", "score", "text"):
        assert [row[name] for row in again.to_pylist()] == [row[name] for row in twice.to_pylist()]
    assert again.ragged("ids").cu_seqlens.tolist() == twice.ragged("ids").cu_seqlens.tolist()
    assert again.ragged("ids").values.tolist() == twice.ragged("ids").values.tolist()


@given(st.lists(ROWS, max_size=5), st.integers(1, 3))
@pytest.mark.more
def test_taking_repeated_rows_is_repeating(rows, times):
    repeated = make(rows).take(np.repeat(np.arange(len(rows)), times))
    assert repeated.to_pylist() == [row for row in rows for _ in range(times)]


def test_joining_puts_columns_side_by_side_and_the_right_one_wins():
    left = numbered(10).slice(3, 6)
    right = Batch.concat([numbered(5).slice(1, 2), numbered(9).slice(7, 9)])
    joined = left | right.select(["number"])
    assert joined.columns == ["ids", "number", "text"]
    assert joined["number"].tolist() == [1, 7, 8]
    assert joined["text"] == ["row 3", "row 4", "row 5"]
    assert left.with_columns({"more": [1, 2, 3]}).columns == ["ids", "number", "text", "more"]
    assert left["number"].tolist() == [3, 4, 5]


def test_concat_follows_the_first_ones_order_of_columns():
    first = Batch.from_columns({"a": [1], "b": ["x"]})
    second = Batch.from_columns({"b": ["y"], "a": [2]})
    both = Batch.concat([first, second])
    assert both.columns == ["a", "b"]
    assert both["a"].tolist() == [1, 2] and both["b"] == ["x", "y"]


def test_an_empty_batch_keeps_its_types():
    empty = numbered(4).slice(2, 2)
    for batch in (empty, empty.take([]), Batch.concat([empty, empty]), numbered(4).take([])):
        assert len(batch) == 0
        assert batch["number"].dtype == torch.int64
        assert batch["ids"].cu_seqlens.tolist() == [0] and batch["ids"].rows() == []
        assert batch.lengths("ids").shape == (0,)
    assert Batch.concat([empty, numbered(4)]).to_pylist() == numbered(4).to_pylist()


def test_pickling_a_slice_sends_only_its_rows():
    batch = numbered(10_000)
    whole, part = pickle.dumps(batch), pickle.dumps(batch.slice(5000, 5010))
    assert len(part) < 4_000 < 200_000 < len(whole)
    assert pickle.loads(part).to_pylist() == batch.slice(5000, 5010).to_pylist()
    assert pickle.loads(whole).to_pylist() == batch.to_pylist()


def test_pickling_a_whole_batch_copies_nothing():
    ids = torch.arange(100_000)
    batch = Batch.from_columns({"ids": RaggedColumn(ids, torch.arange(0, 100_001, 10))})
    data, buffers = out_of_band(batch)
    assert len(data) < 4_000
    addresses = {memoryview(buffer).obj.address for buffer in buffers}
    assert ids.data_ptr() in addresses
    assert pickle.loads(data, buffers=buffers)["ids"].values.data_ptr() == ids.data_ptr()


def test_an_unknown_column_is_named_with_the_nearest():
    with pytest.raises(DataError, match=r"no column `idz`; it has ids, number, text\. .*`ids`\?"):
        numbered(2)["idz"]
    with pytest.raises(DataError, match=r"no column `numbr`.*`number`"):
        numbered(2).select(["ids", "numbr"])


def test_columns_of_different_length_are_named():
    with pytest.raises(DataError, match=r"'a': 2, 'b': 3"):
        Batch.from_columns({"a": [1, 2], "b": [1, 2, 3]})
    with pytest.raises(DataError, match="2 and 3"):
        numbered(2) | numbered(3)


def test_a_column_of_one_value_per_sample_is_not_ragged():
    for call in (Batch.ragged, Batch.lengths, Batch.padded):
        with pytest.raises(DataError, match="`number` holds one value per sample"):
            call(numbered(2), "number")


def test_it_says_what_it_holds():
    assert "number" in numbered(2) and "other" not in numbered(2)
    assert repr(numbered(2)).startswith("Batch(2 rows; ids: large_list<")


@pytest.mark.parametrize("rows", [[2], [1, 2], [0, 5, 1], [-1], [0, -2]])
def test_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(DataError, match=r"no row -?\d of a batch of 2 rows"):
        numbered(2).take(rows)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_a_mask_takes_the_rows_where_it_is_true(kind):
    taken = numbered(4).take(kind([False, True, True, False]))
    assert taken["number"].tolist() == [1, 2]
    assert len(numbered(2).take(kind([False, False]))) == 0
    with pytest.raises(DataError, match=r"mask of 2 booleans .* batch of 4 rows"):
        numbered(4).take(kind([True, False]))


@pytest.mark.parametrize("rows", [[1.9], np.asarray([0.0]), torch.tensor([1.0]), ["1"]])
def test_row_numbers_are_whole(rows):
    with pytest.raises(DataError, match="whole numbers or by a mask"):
        numbered(4).take(rows)
    with pytest.raises(DataError, match=r"the shape \[1, 2\]"):
        numbered(4).take(torch.tensor([[0, 1]]))


def test_row_numbers_of_a_table_whose_size_is_not_known():
    assert resolve_row_numbers([3, 1], None).tolist() == [3, 1]
    assert resolve_row_numbers([True, False, True], None).tolist() == [0, 2]
    assert resolve_row_numbers([], None).tolist() == []
    with pytest.raises(DataError, match="no row -1: rows are counted from 0"):
        resolve_row_numbers([-1], None)


def test_users_get_their_own_columns_whatever_these_are_called():
    own = {
        "doc_ids": [1, 2],
        "user_ids": ["a", "b"],
        "tag_ids": [["x"], []],
        "image_ids": [[1, 2], [3]],
        "unit_test_mask": ["t", "f"],
        "my_log_probs": [0.5, 0.25],
    }
    library = {name: [[1], [2, 3]] for name in ("prompt_ids", "response_mask", "log_probs")}
    library |= {"group_id": [0, 1], "reward/exact": [0.0, 1.0], "cost/x/y": [0.0, 1.0]}
    rows = Batch.from_columns(own | library).rows_for_users()
    assert rows == [{name: values[row] for name, values in own.items()} for row in (0, 1)]


def test_a_token_column_of_a_rank_without_rows():
    empty = Batch.from_columns({"out_ids": [], "text": []})
    some = Batch.from_columns({"out_ids": [torch.tensor([1, 2])], "text": ["a"]})
    assert empty.ragged("out_ids").rows() == [] and empty.lengths("out_ids").shape == (0,)
    for order in ([empty, some], [some, empty], [empty, empty, some]):
        both = Batch.concat(order)
        assert both.to_pylist() == [{"out_ids": [1, 2], "text": "a"}]
        assert both["out_ids"].values.dtype == torch.int64


def test_concat_of_other_columns_names_them():
    first, second = Batch.from_columns({"a": [1], "b": [2]}), Batch.from_columns({"a": [3]})
    for order in ([first, second], [second, first]):
        with pytest.raises(DataError, match=r"`b` is not in all of them \(of 2 batches"):
            Batch.concat(order)
    with pytest.raises(DataError, match="one batch or more"):
        Batch.concat([])
    with pytest.raises(DataError, match="same kind of values"):
        Batch.concat([first, Batch.from_columns({"a": ["x"], "b": [2]})])


def test_concat_can_fill_what_is_missing():
    shards = [
        Batch.from_columns({"scores": torch.ones(1), "reward/f/steps": torch.ones(1)}),
        Batch.from_columns({"scores": torch.zeros(2), "note": ["x", "y"], "ids": [[1], [2, 3]]}),
    ]
    for order, row in ((shards, 0), (shards[::-1], 2)):
        both = Batch.concat(order, fill_missing=True)
        steps = both["reward/f/steps"]
        assert steps.dtype == torch.float32 and steps[row] == 1 and steps.isnan().sum() == 2
        assert both["note"][row] is None and sorted(filter(None, both["note"])) == ["x", "y"]
        assert both["ids"].lengths[row] == 0 and both["ids"].values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [torch.tensor, np.asarray])
def test_tensors_of_two_dims_are_lists_of_numbers(kind):
    batch = Batch.from_columns({"x": kind([[1, 2, 3], [4, 5, 6]])})
    assert batch["x"].values.tolist() == [1, 2, 3, 4, 5, 6] and batch["x"].lengths.tolist() == [
        3,
        3,
    ]
    assert Batch.from_columns({"x": torch.zeros(2, 0)})["x"].lengths.tolist() == [0, 0]
    assert len(Batch.from_columns({"x": torch.zeros(0, 4)})) == 0
    assert Batch.from_columns({"x": [kind(1.5), kind(2.5)]})["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    "column", [torch.zeros(2, 2, 2), torch.tensor(1.0), [torch.zeros(1, 2)], [1, "a"], [object()]]
)
def test_what_cannot_be_a_column_is_named(column):
    with pytest.raises(DataError, match="The column `odd` cannot be stored: "):
        Batch.from_columns({"odd": column})


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.list_(pa.int64(), 2), pa.list_(pa.float32())]
)
def test_lists_of_numbers_from_files_are_ragged(kind, tmp_path):
    table = pa.table({"ids": pa.array([[1, 2], [3, 4], [5, 6]], type=kind)})
    pq.write_table(table, tmp_path / "rows.parquet")
    for batch in (Batch(table), Batch(pq.read_table(tmp_path / "rows.parquet"))):
        part = batch.slice(1, 3)
        assert part["ids"].rows()[1].tolist() == [5, 6] and part["ids"].cu_seqlens[0] == 0
        assert part.lengths("ids").tolist() == [2, 2]


IN_PLACE = {
    "mul_": lambda x: x.mul_(0),
    "-=": lambda x: x.__isub__(1),
    "**=": lambda x: x.__ipow__(2),
    "/=": lambda x: x.__itruediv__(2),
    "x[0] =": lambda x: x.__setitem__(0, 9),
    "out=": lambda x: torch.add(torch.ones(3), 1, out=x),
    "relu_": lambda x: torch.relu_(x),
    "inplace=True": lambda x: torch.nn.functional.relu(x, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "init": lambda x: torch.nn.init.zeros_(x),
}
SHARING = {
    "itself": lambda x: x,
    "slice": lambda x: x[:],
    "view": lambda x: x.view(1, 3)[0],
    "reshape": lambda x: x.reshape(3, 1).squeeze(1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "to": lambda x: x.to("cpu"),
    "split": lambda x: x.split(3)[0],
    "keyword": lambda x: torch.reshape(input=x, shape=(3,)),
    "unbind": lambda x: x.view(3, 1).unbind(1)[0],
}


@pytest.mark.parametrize(
    ("share", "write"),
    [
        pytest.param(
            *(share, write), marks=() if share == "itself" or write == "mul_" else pytest.mark.more
        )
        for share, write in itertools.product(SHARING, IN_PLACE)
    ],
)
def test_a_column_cannot_be_changed_in_place(share, write):
    batch = Batch.from_columns({"x": torch.tensor([-1.0, 2.0, 3.0])})
    with pytest.raises(DataError, match=r"in place.*x = x - y.*x\.clone\(\)"):
        IN_PLACE[write](SHARING[share](batch["x"]))
    with torch.inference_mode(), pytest.raises(DataError, match="in place"):
        IN_PLACE[write](SHARING[share](batch["x"]))
    assert batch["x"].tolist() == [-1.0, 2.0, 3.0]


def test_rows_values_and_arrays_of_a_column_cannot_be_changed():
    ids = Batch.from_columns({"ids": [[1, 2], [3]]})["ids"]
    for tensor in (ids.values, ids.rows()[1]):
        with pytest.raises(DataError, match="in place"):
            tensor += 1
    for array in (ids.values.numpy(), np.asarray(ids.values)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9
    torch.from_dlpack(ids.values).zero_()
    assert ids.values.tolist() == [1, 2, 3]


def test_what_is_made_of_a_column_is_a_tensor_like_any_other():
    x = Batch.from_columns({"x": torch.tensor([1.0, 2.0])})["x"]
    weights = torch.ones(2, requires_grad=True)
    made = [x - x.mean(), x.clone(), torch.cat([x, x]), x.double(), x[torch.tensor([0])], x > 1]
    made += [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), weights * x, torch.ones(2).copy_(x)]
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    made += [torch.load(file), *x.view(1, 2).max(1)]
    assert [type(tensor) for tensor in made] == [torch.Tensor] * len(made)
    (weights * x).sum().backward()
    assert weights.grad.tolist() == [1.0, 2.0] and type(weights.grad) is torch.Tensor
    weights.grad.mul_(x)
    assert weights.grad.tolist() == [1.0, 4.0]


def test_reading_a_large_column_copies_nothing():
    tokens = 8 << 20
    values = torch.arange(tokens)
    batch = Batch.from_columns({"ids": RaggedColumn(values, torch.arange(0, tokens + 1, 1024))})
    column = batch["ids"].values
    assert column.data_ptr() == values.data_ptr()
    assert int(column.sum()) == tokens * (tokens - 1) // 2

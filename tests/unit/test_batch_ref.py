"""BatchRef: tables in shards, read as if they were plain lists, and only what is needed fetched."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.controller import BatchRef, InlineExecutor
from hybridrl.controller.host import Reply
from hybridrl.controller.table import Part, Shard, ShardInfo, Table
from hybridrl.core.batch import Batch, Ragged
from hybridrl.core.record import Record
from hybridrl.errors import DataError

WHOLE = Part(0, 1, "rows")


class Store:
    """Fetches a reference that is the object itself, and remembers which batches were asked for."""

    def __init__(self):
        self.fetched = []

    def __call__(self, reference):
        if isinstance(reference, Batch):
            self.fetched.append(reference)
        return reference


def shard_table(batch, blocks):
    """`batch` in shards; each block is the row numbers that one shard holds, in its order."""
    parts = []
    for block in blocks:
        part = batch.take(block)
        info = ShardInfo.of(part, np.asarray(block, dtype=np.int64))
        parts.append(Shard(part, Reply(Record("actor", 0, "call"), info=info)))
    return BatchRef(Table(tuple(parts)))


def columns(lengths, prefix):
    """One column of token ids of these lengths, one of numbers, one of text."""
    return Batch.from_columns(
        {
            f"{prefix}_ids": Ragged(
                torch.arange(sum(lengths)), torch.tensor([0, *itertools.accumulate(lengths)])
            ),
            f"{prefix}_number": torch.arange(len(lengths)),
            f"{prefix}_text": [f"{prefix}{row}" for row in range(len(lengths))],
        }
    )


@st.composite
def tables(draw, rows, prefix):
    """A table of `rows` rows in shards of any size, empty ones too, in any order; and its rows."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    order = draw(st.permutations(range(rows)))
    cuts = draw(st.lists(st.integers(0, rows), max_size=3))
    edges = [0, *sorted(cuts), rows]
    blocks = [order[start:stop] for start, stop in itertools.pairwise(edges)]
    batch = columns(lengths, prefix)
    return shard_table(batch, blocks), batch.to_pylist()


def read(ref, part=WHOLE):
    return ref.read(part, Store())[0].to_pylist()


@given(st.data())
def test_any_chain_of_operations_reads_as_that_of_lists(data):
    count = data.draw(st.integers(1, 6))
    ref, rows = data.draw(tables(count, "a"))
    for step in range(data.draw(st.integers(0, 4))):
        match data.draw(st.sampled_from(["take", "repeat", "split", "join", "concat"])):
            case "take":
                chosen = data.draw(
                    st.lists(st.integers(0, len(rows) - 1), max_size=6) if rows else st.just([])
                )
                ref, rows = ref.take(chosen), [rows[row] for row in chosen]
            case "repeat":
                times = data.draw(st.integers(1, 3))
                ref, rows = ref.repeat(times), [row for row in rows for _ in range(times)]
            case "split":
                parts = data.draw(st.integers(1, 3))
                index = data.draw(st.integers(0, parts - 1))
                ref = ref.split(parts, "rows")[index]
                edges = [len(rows) * i // parts for i in range(parts + 1)]
                rows = rows[edges[index] : edges[index + 1]]
            case "concat":
                chosen = [data.draw(st.lists(st.integers(0, 5), max_size=4)) for _ in range(2)]
                chosen = [[row for row in part if row < len(rows)] for part in chosen]
                ref = BatchRef.concat([ref.take(chosen[0]), ref, ref.take(chosen[1])])
                rows = [rows[row] for row in chosen[0]] + rows + [rows[row] for row in chosen[1]]
            case "join":
                right, more = data.draw(tables(len(rows), f"b{step}"))
                ref, rows = ref | right, [x | y for x, y in zip(rows, more, strict=True)]
    assert read(ref) == rows
    assert ref.node.num_rows(Store()) == len(rows)
    tokens = ref.node.tokens(Store())
    for name, counts in tokens.items():
        assert counts.tolist() == [len(row[name]) for row in rows]
    if rows:
        assert tokens.keys() == {name for name in rows[0] if name.endswith("_ids")}


@given(st.data(), st.integers(1, 5), st.sampled_from(["rows", "tokens"]))
def test_the_parts_of_a_split_hold_every_row_once(data, parts, balance):
    ref, rows = data.draw(tables(data.draw(st.integers(1, 7)), "a"))
    ref, rows = ref.repeat(2), [row for row in rows for _ in range(2)]
    numbers, costs = [], []
    for index, piece in enumerate(ref.split(parts, balance)):
        batch, of_part = ref.read(Part(index, parts, balance), Store())
        assert read(piece) == batch.to_pylist() == [rows[row] for row in of_part]
        assert of_part.tolist() == sorted(of_part)
        numbers.extend(of_part.tolist())
        costs.append(sum(len(rows[row]["a_ids"]) + 1 for row in of_part))
    assert sorted(numbers) == list(range(len(rows)))
    if balance == "tokens":
        assert max(costs) - min(costs) <= max(len(row["a_ids"]) + 1 for row in rows)


@given(st.data())
def test_tables_below_each_other_read_as_one_list(data):
    found = [data.draw(tables(data.draw(st.integers(1, 4)), "a")) for _ in range(3)]
    ref = BatchRef.concat([ref for ref, _ in found])
    rows = [row for _, part in found for row in part]
    assert read(ref) == rows
    assert ref.node.num_rows(Store()) == len(rows)
    assert ref.node.tokens(Store())["a_ids"].tolist() == [len(row["a_ids"]) for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert read(ref.take(chosen)) == [rows[row] for row in chosen]
    assert read(ref.select("a_text")) == [{"a_text": row["a_text"]} for row in rows]
    more = columns([1] * len(rows), "b")
    joined = [x | y for x, y in zip(rows, more.to_pylist(), strict=True)]
    assert read(ref | shard_table(more, [range(len(rows))])) == joined
    shards = [shard for part, _ in found for shard in part.node.shards()]
    assert [id(shard) for shard in ref.node.shards()] == [id(shard) for shard in shards]


def test_of_tables_below_each_other_only_the_wanted_are_fetched():
    parts = [shard_table(columns([1, 2], "a"), [[0], [1]]) for _ in range(3)]
    ref = BatchRef.concat(parts)
    store = Store()
    assert len(ref.take([3, 2]).read(WHOLE, store)[0]) == 2
    assert {id(b) for b in store.fetched} == {id(s.data) for s in parts[1].node.shards()}
    batch, _ = ref.take([]).read(WHOLE, Store())
    assert len(batch) == 0 and batch["a_ids"].values.dtype == torch.int64
    assert BatchRef.concat(parts[:1]) is parts[0]
    with pytest.raises(DataError, match="Concatenate before `select`"):
        BatchRef.concat([parts[0], parts[1].select("a_ids")])
    with pytest.raises(DataError, match=r"column\(s\) scores yet"):
        read(ref.select("scores"))


@given(st.data(), st.integers(1, 5), st.integers(2, 3), st.sampled_from(["rows", "tokens"]))
def test_rows_that_belong_together_are_never_parted(data, parts, together, balance):
    ref, rows = data.draw(tables(together * data.draw(st.integers(1, 5)), "a"))
    numbers, costs = [], []
    for index in range(parts):
        batch, of_part = ref.read(Part(index, parts, balance, together), Store())
        assert batch.to_pylist() == [rows[row] for row in of_part]
        units = of_part.reshape(-1, together)
        assert (units == units[:, :1] + np.arange(together)).all()
        assert (units[:, 0] % together == 0).all() and (np.diff(units[:, 0]) > 0).all()
        numbers.extend(of_part.tolist())
        costs.append(sum(len(rows[row]["a_ids"]) for row in of_part) + len(units))
    assert sorted(numbers) == list(range(len(rows)))
    if balance == "tokens":
        sizes = np.array([len(row["a_ids"]) for row in rows]).reshape(-1, together).sum(1) + 1
        assert max(costs) - min(costs) <= sizes.max()


def test_tokens_are_balanced_by_all_rows_that_belong_together():
    ref = shard_table(columns([5, 0, 5, 5, 0, 5], "a"), [range(6)])
    parts = [ref.read(Part(index, 2, "tokens", 2), Store())[1].tolist() for index in range(2)]
    assert sorted(parts) == [[0, 1, 4, 5], [2, 3]]


def test_rows_left_over_cannot_be_dealt_out_together():
    ref = shard_table(columns([1, 2, 3], "a"), [[0, 1, 2]])
    with pytest.raises(DataError, match="3 rows cannot be dealt out 2 at a time"):
        ref.read(Part(0, 2, "tokens", 2), Store())


def test_shards_of_two_calls_hold_different_rows_in_different_order():
    left = shard_table(columns([1, 2, 3, 4], "a"), [[2, 0], [3, 1]])
    right = shard_table(columns([4, 3, 2, 1], "b"), [[1], [0, 3, 2]])
    batch = (left | right).read(WHOLE, Store())[0]
    assert batch["a_number"].tolist() == batch["b_number"].tolist() == [0, 1, 2, 3]
    assert batch["a_ids"].lengths.tolist() == [1, 2, 3, 4]
    assert batch["b_ids"].lengths.tolist() == [4, 3, 2, 1]


def test_the_right_table_wins():
    left = shard_table(columns([1, 1], "a"), [[0, 1]])
    right = shard_table(columns([2, 2], "a"), [[1], [0]])
    joined = left | right
    assert joined.read(WHOLE, Store())[0]["a_ids"].lengths.tolist() == [2, 2]
    assert joined.node.tokens(Store())["a_ids"].tolist() == [2, 2]


def test_rows_without_token_columns_spread_over_the_parts():
    ref = shard_table(Batch.from_columns({"x": torch.arange(8)}), [range(8)])
    sizes = [len(read(part)) for part in ref.split(4, "tokens")]
    assert sizes == [2, 2, 2, 2]


def test_only_the_shards_with_wanted_columns_are_fetched():
    left = shard_table(columns([1, 2, 3], "a"), [[2, 0], [1]])
    right = shard_table(columns([3, 2, 1], "b"), [[0, 1], [2]])
    store = Store()
    batch, _ = (left | right).select("b_ids").read(WHOLE, store)
    assert batch.columns == ["b_ids"]
    assert {id(found) for found in store.fetched} == {
        id(shard.data) for shard in right.node.shards()
    }


def test_only_the_shards_with_wanted_rows_are_fetched():
    ref = shard_table(columns([1, 2, 3, 4], "a"), [[3], [0, 1], [2]])
    shards = [shard.data for shard in ref.node.shards()]
    for wanted, rows in (([shards[1]], [1, 0, 1]), ([shards[0], shards[2]], [2, 3])):
        store = Store()
        batch, _ = ref.take(rows).read(WHOLE, store)
        assert batch["a_number"].tolist() == rows
        assert all(x is y for x, y in zip(store.fetched, wanted, strict=True))
    store = Store()
    ref.read(Part(0, 2, "rows"), store)
    assert len(store.fetched) == 1 and store.fetched[0] is shards[1]


def test_counts_and_cuts_fetch_no_data():
    ref = shard_table(columns([1, 2, 3, 4], "a"), [[3], [0, 1], [2]])
    store = Store()
    part = ref.repeat(3).split(2, "tokens")[1]
    assert part.node.num_rows(store) == 6 and part.node.tokens(store)["a_ids"].sum() == 15
    assert store.fetched == []


def test_nothing_wanted_keeps_the_types():
    ref = shard_table(columns([1, 2], "a"), [[1], [0]])
    batch, rows = ref.take([]).read(WHOLE, Store())
    assert len(batch) == len(rows) == 0
    assert batch["a_ids"].values.dtype == torch.int64 and batch["a_text"] == []


def test_on_the_driver():
    executor = InlineExecutor("cpu")
    ref = executor.put(columns([1, 2, 3], "a"))
    assert len(ref) == 3 and len(ref.repeat(2)) == 6
    assert ref.take([2, 0]).collect(["a_text"]).to_pylist() == [{"a_text": "a2"}, {"a_text": "a0"}]
    assert ref.collect().columns == ["a_ids", "a_number", "a_text"]
    joined = ref | executor.put(Batch.from_columns({"more": [5, 6, 7]}))
    assert joined.collect(["more", "a_number"])["more"].tolist() == [5, 6, 7]


def test_errors_are_sentences():
    ref = shard_table(columns([1, 2], "a"), [[0, 1]])
    longer = shard_table(columns([1, 2, 3], "b"), [[0, 1, 2]])
    with pytest.raises(DataError, match=r"Tables of 2 and of 3 rows"):
        read(ref | longer)
    for left, right in ((ref.select("a_ids"), ref), (ref, ref.select("a_ids"))):
        with pytest.raises(DataError, match="Join before `select`"):
            left | right
    with pytest.raises(DataError, match=r"column\(s\) advantages, scores yet"):
        read(ref.select("a_ids", "scores", "advantages"))
    with pytest.raises(DataError, match=r"column\(s\) scores yet"):
        read(ref.select("scores"))
    travelled = pickle.loads(pickle.dumps(InlineExecutor("cpu").put(columns([1], "a"))))
    assert read(travelled)[0]["a_text"] == "a0"
    for evaluate in (len, BatchRef.collect, lambda ref: ref.apply(lambda batch: batch, ["a_ids"])):
        with pytest.raises(DataError, match="on the driver only"):
            evaluate(travelled)


class NotYetError(Exception):
    """A shard was asked for that has not come."""


def shards_of_stream(batch, blocks, come):
    """A stream of `batch`, a block of rows at a time, of which the first `come` are there."""

    class Late:
        info = property(lambda self: (_ for _ in ()).throw(NotYetError()))

    parts = []
    for number, block in enumerate(blocks):
        part = batch.take(block)
        info = ShardInfo.of(part, np.asarray(block, dtype=np.int64), len(batch))
        reply = Reply(Record("generator", 0, "take"), info=info) if number < come else Late()
        parts.append(BatchRef(Table((Shard(part, reply),))))
    return BatchRef.of_stream(parts)


def test_parts_of_a_stream_are_read_before_the_rest_has_come():
    prompts, samples = columns([2, 1, 3, 1, 2], "prompt"), columns([4, 5, 1, 2, 3], "response")
    blocks = [[3, 0], [], [4, 1, 2]]
    stream = shards_of_stream(samples, blocks, come=2)
    joined = (shard_table(prompts, [range(5)]) | stream).select("prompt_number", "response_ids")
    with pytest.raises(NotYetError):
        joined.read(WHOLE, Store())
    parts = joined.by_parts()
    batch, rows = parts[0].read(WHOLE, Store())
    assert rows.tolist() == [0, 3]
    assert batch["prompt_number"].tolist() == [0, 3]
    assert [r.tolist() for r in batch["response_ids"].rows()] == [
        samples["response_ids"].rows()[row].tolist() for row in (0, 3)
    ]
    empty, rows = parts[1].read(WHOLE, Store())
    assert len(empty) == len(rows) == 0 and set(empty.columns) == {"prompt_number", "response_ids"}
    halves = [parts[0].read(Part(i, 2, "tokens"), Store())[1].tolist() for i in (0, 1)]
    assert sorted(halves[0] + halves[1]) == [0, 3] and all(halves)


def test_a_stream_that_has_come_is_a_table_like_any_other():
    samples = columns([4, 5, 1, 2, 3], "response")
    stream = shards_of_stream(samples, [[3, 0], [], [4, 1, 2]], come=3)
    assert stream.read(WHOLE, Store())[0].to_pylist() == samples.to_pylist()
    assert (
        stream.take([2, 0]).read(WHOLE, Store())[0].to_pylist() == samples.take([2, 0]).to_pylist()
    )
    assert stream.take([2, 0]).by_parts()[0].only is None

"""BatchRef: tables in shards, read as if they were plain lists, and only what is needed fetched."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.controller import BatchRef, InlineExecutor
from hybridrl.controller.group_call import (
    UNKNOWN,
    ExpectedColumns,
    RequestedColumns,
    ShardedResult,
    ShardInfo,
)
from hybridrl.controller.row_selections import PartitionSelection
from hybridrl.controller.table_expression import ResultTable
from hybridrl.errors import DataError

WHOLE = PartitionSelection(0, 1)


class NotYetError(Exception):
    """A result was asked for that has not come."""


class Stored(ShardedResult):
    """A result whose shards are here; remembers which of them were fetched."""

    def __init__(self, batch, blocks, *, known=False, total=None, has_come=True):
        columns = ExpectedColumns(frozenset(batch.columns)) if known else UNKNOWN
        super().__init__(columns, len(batch) if known else None)
        self.parts = [batch.take(block) for block in blocks]
        self.rows_of = [np.asarray(block, dtype=np.int64) for block in blocks]
        self.total, self.has_come, self.fetched = total, has_come, []

    def infos(self):
        if not self.has_come:
            raise NotYetError
        return [
            ShardInfo.of(part, rows, self.total)
            for part, rows in zip(self.parts, self.rows_of, strict=True)
        ]

    def batch(self, index):
        self.fetched.append(index)
        return self.parts[index]


def shard_table(batch, blocks, **options):
    """`batch` in shards; each block is the row numbers that one shard holds, in its order."""
    return BatchRef(ResultTable((Stored(batch, blocks, **options),)))


def fetched(ref):
    """Which shards of each result below were fetched since the last time."""
    found = [result.fetched for result in ref.node.shards()]
    for result in ref.node.shards():
        result.fetched = []
    return found


def columns(lengths, prefix):
    """One column of token ids of these lengths, one of numbers, one of text."""
    return Batch.from_columns(
        {
            f"{prefix}_ids": RaggedColumn(
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
    return ref.read(part)[0].to_pylist()


@given(st.data())
def test_any_chain_of_operations_reads_as_that_of_lists(data):
    count = data.draw(st.integers(1, 6))
    ref, rows = data.draw(tables(count, "prompt"))
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
    assert ref.node.num_rows() == len(rows)
    tokens = ref.node.tokens()
    for name, counts in tokens.items():
        assert counts.tolist() == [len(row[name]) for row in rows]
    if rows:
        assert tokens.keys() == {name for name in rows[0] if name == "prompt_ids"}


@given(st.data(), st.integers(1, 5), st.sampled_from(["rows", "tokens"]))
def test_the_parts_of_a_split_hold_every_row_once(data, parts, balance):
    ref, rows = data.draw(tables(data.draw(st.integers(0, 7)), "prompt"))
    ref, rows = ref.repeat(2), [row for row in rows for _ in range(2)]
    numbers, costs = [], []
    for index, piece in enumerate(ref.split(parts, balance)):
        batch, of_part = ref.read(PartitionSelection(index, parts, balance))
        assert read(piece) == batch.to_pylist() == [rows[row] for row in of_part]
        assert of_part.tolist() == sorted(of_part)
        numbers.extend(of_part.tolist())
        costs.append(sum(len(rows[row]["prompt_ids"]) + 1 for row in of_part))
    assert sorted(numbers) == list(range(len(rows)))
    if balance == "tokens":
        longest = max((len(row["prompt_ids"]) + 1 for row in rows), default=0)
        assert max(costs) - min(costs) <= longest


@given(st.data())
def test_tables_below_each_other_read_as_one_list(data):
    found = [data.draw(tables(data.draw(st.integers(1, 4)), "prompt")) for _ in range(3)]
    ref = BatchRef.concat([ref for ref, _ in found])
    rows = [row for _, part in found for row in part]
    assert read(ref) == rows
    assert ref.node.num_rows() == len(rows)
    assert ref.node.tokens()["prompt_ids"].tolist() == [len(row["prompt_ids"]) for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert read(ref.take(chosen)) == [rows[row] for row in chosen]
    assert read(ref.select("prompt_text")) == [{"prompt_text": row["prompt_text"]} for row in rows]
    more = columns([1] * len(rows), "response")
    joined = [x | y for x, y in zip(rows, more.to_pylist(), strict=True)]
    assert read(ref | shard_table(more, [range(len(rows))])) == joined
    shards = [shard for part, _ in found for shard in part.node.shards()]
    assert [id(shard) for shard in ref.node.shards()] == [id(shard) for shard in shards]


def test_of_tables_below_each_other_only_the_wanted_are_fetched():
    parts = [shard_table(columns([1, 2], "prompt"), [[0], [1]]) for _ in range(3)]
    ref = BatchRef.concat(parts)
    assert len(ref.take([3, 2]).read(WHOLE)[0]) == 2
    assert [sorted(found) for found in fetched(ref)] == [[], [0, 1], []]
    batch, _ = ref.take([]).read(WHOLE)
    assert len(batch) == 0 and batch["prompt_ids"].values.dtype == torch.int64
    assert BatchRef.concat(parts[:1]) is parts[0]
    with pytest.raises(DataError, match="Concatenate before `select`"):
        BatchRef.concat([parts[0], parts[1].select("prompt_ids")])
    with pytest.raises(DataError, match=r"column\(s\) scores yet"):
        read(ref.select("scores"))


@given(st.data(), st.integers(1, 5), st.integers(2, 3), st.sampled_from(["rows", "tokens"]))
def test_rows_that_belong_together_are_never_parted(data, parts, together, balance):
    ref, rows = data.draw(tables(together * data.draw(st.integers(1, 5)), "prompt"))
    numbers, costs = [], []
    for index in range(parts):
        batch, of_part = ref.read(PartitionSelection(index, parts, balance, together))
        assert batch.to_pylist() == [rows[row] for row in of_part]
        units = of_part.reshape(-1, together)
        assert (units == units[:, :1] + np.arange(together)).all()
        assert (units[:, 0] % together == 0).all() and (np.diff(units[:, 0]) > 0).all()
        numbers.extend(of_part.tolist())
        costs.append(sum(len(rows[row]["prompt_ids"]) for row in of_part) + len(units))
    assert sorted(numbers) == list(range(len(rows)))
    if balance == "tokens":
        sizes = np.array([len(row["prompt_ids"]) for row in rows]).reshape(-1, together).sum(1) + 1
        assert max(costs) - min(costs) <= sizes.max()


def test_tokens_are_balanced_by_all_rows_that_belong_together():
    ref = shard_table(columns([5, 0, 5, 5, 0, 5], "prompt"), [range(6)])
    parts = [ref.read(PartitionSelection(index, 2, "tokens", 2))[1].tolist() for index in range(2)]
    assert sorted(parts) == [[0, 1, 4, 5], [2, 3]]


def test_rows_left_over_cannot_be_dealt_out_together():
    ref = shard_table(columns([1, 2, 3], "prompt"), [[0, 1, 2]])
    with pytest.raises(DataError, match="3 rows cannot be dealt out 2 at a time"):
        ref.read(PartitionSelection(0, 2, "tokens", 2))


def test_the_right_table_wins():
    left = shard_table(columns([1, 1], "prompt"), [[0, 1]])
    right = shard_table(columns([2, 2], "prompt"), [[1], [0]])
    joined = left | right
    assert joined.read(WHOLE)[0]["prompt_ids"].lengths.tolist() == [2, 2]
    assert joined.node.tokens()["prompt_ids"].tolist() == [2, 2]


def test_rows_without_token_columns_spread_over_the_parts():
    ref = shard_table(Batch.from_columns({"x": torch.arange(8)}), [range(8)])
    sizes = [len(read(part)) for part in ref.split(4, "tokens")]
    assert sizes == [2, 2, 2, 2]


def test_only_the_shards_with_wanted_columns_are_fetched():
    left = shard_table(columns([1, 2, 3], "prompt"), [[2, 0], [1]])
    right = shard_table(columns([3, 2, 1], "response"), [[0, 1], [2]])
    batch, _ = (left | right).select("response_ids").read(WHOLE)
    assert batch.columns == ["response_ids"]
    assert fetched(left) == [[]] and sorted(fetched(right)[0]) == [0, 1]


def test_only_the_shards_with_wanted_rows_are_fetched():
    ref = shard_table(columns([1, 2, 3, 4], "prompt"), [[3], [0, 1], [2]])
    for wanted, rows in (([1], [1, 0, 1]), ([0, 2], [2, 3])):
        batch, _ = ref.take(rows).read(WHOLE)
        assert batch["prompt_number"].tolist() == rows
        assert fetched(ref) == [wanted]
    ref.read(PartitionSelection(0, 2))
    assert fetched(ref) == [[1]]


def test_counts_and_cuts_fetch_no_data():
    ref = shard_table(columns([1, 2, 3, 4], "prompt"), [[3], [0, 1], [2]])
    parts = ref.repeat(3).split(2, "tokens")
    assert sum(part.node.num_rows() for part in parts) == 12
    tokens = [int(part.node.tokens()["prompt_ids"].sum()) for part in parts]
    assert sum(tokens) == 30 and abs(tokens[0] - tokens[1]) <= 4
    assert fetched(ref) == [[]]


def test_nothing_wanted_keeps_the_types():
    ref = shard_table(columns([1, 2], "prompt"), [[1], [0]])
    batch, rows = ref.take([]).read(WHOLE)
    assert len(batch) == len(rows) == 0
    assert batch["prompt_ids"].values.dtype == torch.int64 and batch["prompt_text"] == []


def test_on_the_driver():
    executor = InlineExecutor("cpu")
    ref = executor.put(columns([1, 2, 3], "prompt"))
    assert len(ref) == 3 and len(ref.repeat(2)) == 6
    found = ref.take([2, 0]).collect(["prompt_text"]).to_pylist()
    assert found == [{"prompt_text": "prompt2"}, {"prompt_text": "prompt0"}]
    assert ref.collect().columns == ["prompt_ids", "prompt_number", "prompt_text"]
    joined = ref | executor.put(Batch.from_columns({"more": [5, 6, 7]}))
    assert joined.collect(["more", "prompt_number"])["more"].tolist() == [5, 6, 7]


def test_errors_are_sentences():
    ref = shard_table(columns([1, 2], "prompt"), [[0, 1]])
    longer = shard_table(columns([1, 2, 3], "response"), [[0, 1, 2]])
    with pytest.raises(DataError, match=r"Tables of 2 and of 3 rows"):
        read(ref | longer)
    for left, right in ((ref.select("prompt_ids"), ref), (ref, ref.select("prompt_ids"))):
        with pytest.raises(DataError, match="Join before `select`"):
            left | right
    with pytest.raises(DataError, match=r"column\(s\) advantages, scores yet"):
        read(ref.select("prompt_ids", "scores", "advantages"))
    with pytest.raises(DataError, match=r"column\(s\) scores yet"):
        read(ref.select("scores"))
    travelled = pickle.loads(pickle.dumps(InlineExecutor("cpu").put(columns([1], "prompt"))))
    assert read(travelled)[0]["prompt_text"] == "prompt0"
    apply = lambda ref: ref.apply(lambda batch: batch, ["prompt_ids"])  # noqa: E731
    for evaluate in (len, BatchRef.collect, apply):
        with pytest.raises(DataError, match="on the driver only"):
            evaluate(travelled)


def test_rows_that_do_not_match_are_a_sentence_also_where_tokens_are_counted_first():
    ref = shard_table(columns([1, 2], "prompt"), [[0, 1]])
    longer = shard_table(columns([1, 2, 3], "response"), [[0, 1, 2]])
    with pytest.raises(DataError, match=r"Tables of 2 and of 3 rows"):
        (ref | longer).read(PartitionSelection(0, 2, "tokens"))
    with pytest.raises(DataError, match=r"Tables of 2 and of 3 rows"):
        (ref | longer).node.num_rows()


def test_a_figure_that_a_call_gives_at_times_may_be_missing_in_a_table_below():
    """A further number of a reward, in one refill of a step and not in the next."""

    class Scored(Stored):
        def __init__(self, **found):
            super().__init__(Batch.from_columns(found), [range(2)])
            self.columns = ExpectedColumns(frozenset({"scores"}), ("reward/*",))

    with_steps = Scored(scores=torch.ones(2), **{"reward/f/steps": torch.full((2,), 3.0)})
    tables = [
        BatchRef(ResultTable((found,))) for found in (with_steps, Scored(scores=torch.zeros(2)))
    ]
    for order in (tables, tables[::-1]):
        rows = read(BatchRef.concat(order))
        found = {(row["scores"], row["reward/f/steps"]) for row in rows}
        assert len(rows) == 4 and (1.0, 3.0) in found
        assert all(np.isnan(steps) for score, steps in found if score == 0)
    # Of tables that say nothing of their columns nobody knows whether one was forgotten.
    other = shard_table(Batch.from_columns({"scores": torch.zeros(2)}), [[0, 1]])
    more = shard_table(Batch.from_columns({"scores": torch.zeros(2), "x": [1, 2]}), [[0, 1]])
    with pytest.raises(DataError, match="`x` is not in all of them"):
        read(BatchRef.concat([more, other]))


def test_tables_of_which_one_has_no_tokens_are_balanced_and_told_apart():
    some = shard_table(columns([4, 2], "prompt"), [[0, 1]])
    none = shard_table(Batch.from_columns({"prompt_number": torch.arange(3)}), [[0, 1, 2]])
    for order in ([some, none], [none, some]):
        whole = BatchRef.concat(order)
        numbers = [
            whole.select("prompt_number").read(PartitionSelection(i, 2, "tokens"))[1]
            for i in (0, 1)
        ]
        assert sorted(np.concatenate(numbers)) == list(range(5))
        with pytest.raises(DataError, match="`prompt_ids`"):
            whole.read(WHOLE)


def shards_of_stream(batch, blocks, come):
    """A stream of `batch`, a block of rows at a time, of which the first `come` are there."""
    parts = []
    for number, block in enumerate(blocks):
        result = Stored(batch, [block], total=len(batch), has_come=number < come)
        parts.append(BatchRef(ResultTable((result,))))
    return BatchRef.of_stream(parts)


def test_parts_of_a_stream_are_read_before_the_rest_has_come():
    prompts, samples = columns([2, 1, 3, 1, 2], "prompt"), columns([4, 5, 1, 2, 3], "response")
    blocks = [[3, 0], [], [4, 1, 2]]
    stream = shards_of_stream(samples, blocks, come=2)
    joined = (shard_table(prompts, [range(5)]) | stream).select("prompt_number", "response_ids")
    with pytest.raises(NotYetError):
        joined.read(WHOLE)
    parts = joined.by_parts()
    batch, rows = parts[0].read(WHOLE)
    assert rows.tolist() == [0, 3]
    assert batch["prompt_number"].tolist() == [0, 3]
    assert [r.tolist() for r in batch["response_ids"].rows()] == [
        samples["response_ids"].rows()[row].tolist() for row in (0, 3)
    ]
    empty, rows = parts[1].read(WHOLE)
    assert len(empty) == len(rows) == 0 and set(empty.columns) == {"prompt_number", "response_ids"}
    halves = [parts[0].read(PartitionSelection(i, 2, "tokens"))[1].tolist() for i in (0, 1)]
    assert sorted(halves[0] + halves[1]) == [0, 3] and all(halves)


def test_a_stream_that_has_come_is_a_table_like_any_other():
    samples = columns([4, 5, 1, 2, 3], "response")
    stream = shards_of_stream(samples, [[3, 0], [], [4, 1, 2]], come=3)
    assert stream.read(WHOLE)[0].to_pylist() == samples.to_pylist()
    assert stream.take([2, 0]).read(WHOLE)[0].to_pylist() == samples.take([2, 0]).to_pylist()
    assert stream.take([2, 0]).by_parts()[0].only is None


def late(names, rows=None):
    """The result of a call that says what it makes and is not done."""
    result = Stored(Batch.from_columns({name: [0] for name in names}), [[0]], has_come=False)
    result.columns, result.rows = ExpectedColumns(frozenset(names)), rows
    return BatchRef(ResultTable((result,)))


def test_a_reader_waits_for_no_table_without_its_columns():
    samples = shard_table(columns([1, 2, 3], "prompt"), [[2, 0], [1]], known=True)
    batch = samples | late(["scores", "prompt_text"]) | late(["values"])
    for ref in (
        batch.select("prompt_ids").for_reading(None, "a test"),
        batch.for_reading(RequestedColumns(frozenset(["prompt_ids"])), "a test"),
        batch.for_reading(
            RequestedColumns(frozenset(), lambda name: name == "prompt_number"), "a test"
        ),
    ):
        assert len(ref.read(WHOLE)[0]) == 3
        assert len(ref.node.shards()) == 1
    # The right one wins, so it is waited for, and the left one is not.
    text = batch.for_reading(RequestedColumns(frozenset(["prompt_text"])), "a test")
    assert [sorted(found.columns.certain) for found in text.node.shards()] == [
        ["prompt_text", "scores"]
    ]
    taken = batch.take([1, 0]).repeat(2).split(2)[0].select("prompt_number")
    assert read(taken.for_reading(None, "a test")) == [{"prompt_number": 1}, {"prompt_number": 1}]


def test_whoever_may_have_a_column_is_waited_for():
    unknown = late(["x"])
    unknown.node.results[0].columns = UNKNOWN
    further = late(["scores"])
    further.node.results[0].columns = ExpectedColumns(frozenset(["scores"]), ("reward/*",))
    samples = shard_table(columns([1, 2, 3], "prompt"), [[2, 0], [1]], known=True)
    steps = RequestedColumns(frozenset(["reward/steps"]))
    assert len((samples | further).for_reading(steps, "a test").node.shards()) == 1
    assert len((samples | unknown).select("prompt_ids").node.shards()) == 2
    kept = (unknown | samples).for_reading(RequestedColumns(frozenset(["prompt_ids"])), "a test")
    assert len(kept.node.shards()) == 1, "what is certain on the right need not be looked for"
    every = (samples | further).for_reading(
        RequestedColumns(frozenset(), lambda name: True), "a test"
    )
    assert len(every.node.shards()) == 2


def test_rows_balanced_by_tokens_are_the_same_whatever_is_read():
    samples = shard_table(columns([9, 1, 1, 1], "prompt"), [[0, 1, 2, 3]], known=True)
    numbers = shard_table(Batch.from_columns({"x": [0, 1, 2, 3]}), [[0, 1, 2, 3]], known=True)
    half = (samples | numbers).split(2, "tokens")[0]
    assert half.for_reading(RequestedColumns(frozenset(["x"])), "a test").read(WHOLE)[0][
        "x"
    ].tolist() == [0]


def test_rows_balanced_by_tokens_have_the_columns_that_follow():
    samples = shard_table(columns([9, 1, 1, 1], "prompt"), [[0, 1, 2, 3]], known=True)
    numbers = shard_table(Batch.from_columns({"x": [0, 1, 2, 3]}), [[0, 1, 2, 3]], known=True)
    half = (samples | numbers).split(2, "tokens")[0]
    wanted = RequestedColumns(frozenset(["prompt_ids"]), following=frozenset(["x"]))
    assert "x" in half.for_reading(wanted, "a test").read(WHOLE)[0].columns


def test_a_column_that_no_call_makes_is_refused_at_once():
    batch = late(["prompt_ids", "scores"])
    with pytest.raises(DataError, match=r"^`actor.update` reads the column `score`, which"):
        batch.for_reading(RequestedColumns(frozenset(["score"])), "`actor.update`")
    with pytest.raises(DataError, match=r"the batch has prompt_ids, scores. Did you mean `scores`"):
        batch.for_reading(RequestedColumns(frozenset(["score"])), "`actor.update`")
    with pytest.raises(
        DataError, match="`scores`, which was not selected; those selected are prompt_ids"
    ):
        batch.select("prompt_ids").for_reading(
            RequestedColumns(frozenset(["scores"])), "`actor.update`"
        )
    with pytest.raises(DataError, match="one of these has no scores: it has prompt_ids"):
        BatchRef.concat([batch, late(["prompt_ids"])])


def test_a_table_whose_columns_are_made_anew_does_not_pile_up_old_ones():
    batch = late(["prompt_ids"], rows=3) | late(["x"], rows=3)
    for _ in range(2000):
        batch |= late(["x"], rows=3)
    assert len(batch.node.joined()) == 2 and batch.columns.certain == {"prompt_ids", "x"}
    old, other, new = (
        shard_table(columns(lengths, name), [[0, 1, 2]], known=True)
        for lengths, name in (([1, 2, 3], "x"), ([1, 1, 1], "other"), ([2, 0, 1], "x"))
    )
    kept = old | other | new
    assert len(kept.node.joined()) == 2 and read(kept) == read(other | new)
    unknown = late(["x"]) | late(["x"], rows=3)  # nobody knows yet whether the rows are as many
    assert len(unknown.node.joined()) == 2


def test_rows_that_are_known_beforehand_are_not_waited_for():
    batch = late(["x"], rows=6)
    assert batch.node.known_rows == 6
    assert batch.repeat(2).take([0, 11]).node.known_rows == 2
    assert [part.node.known_rows for part in batch.split(4)] == [1, 2, 1, 2]
    assert BatchRef.concat([batch, batch]).node.known_rows == 12
    assert (batch | late(["y"])).node.known_rows == 6
    assert late(["x"]).repeat(2).node.known_rows is None
    with pytest.raises(DataError, match="Tables of 6 and of 5 rows cannot be joined"):
        batch | late(["y"], rows=5)


def test_what_is_no_row_number_is_refused():
    ref = shard_table(columns([1, 2, 3, 4], "prompt"), [[0, 1, 2, 3]], known=True)
    mask = torch.tensor([False, True, True, False])
    assert [row["prompt_number"] for row in read(ref.take(mask))] == [1, 2]
    for wrong in ([4], [-1], [1.9], [True, False]):
        with pytest.raises(DataError, match=r"[Rr]ow"):
            ref.take(wrong)


def test_a_shard_may_lack_a_column_that_another_has():
    class Ragged2(Stored):
        def __init__(self, *parts):
            super().__init__(parts[0], [[]])
            self.parts, start = list(parts), 0
            self.rows_of = []
            for part in parts:
                self.rows_of.append(np.arange(start, start + len(part)))
                start += len(part)

    with_steps = Batch.from_columns({"scores": [1.0], "reward/steps": [3.0]})
    without = Batch.from_columns({"scores": [2.0, 0.0]})
    nothing = Batch.from_columns({"scores": []})
    for parts, steps in (
        ((with_steps, without), [3.0, None, None]),
        ((without, with_steps), [None, None, 3.0]),
        ((nothing, with_steps), [3.0]),
    ):
        ref = BatchRef(ResultTable((Ragged2(*parts),)))
        found = [row["reward/steps"] for row in read(ref)]
        assert [None if value != value else value for value in found] == steps
        for rank in range(2):  # a rank that reads only rows that lack it has the column, too
            assert "reward/steps" in ref.read(PartitionSelection(rank, 2))[0].columns


def test_columns_of_users_are_no_tokens_by_their_names():
    batch = Batch.from_columns(
        {"doc_ids": [1, 2], "user_ids": ["a", "b"], "tag_ids": [["x"], []], "loss_mask": [0, 1]}
    )
    executor = InlineExecutor("cpu")
    ref = executor.put(batch)
    assert ref.node.tokens() == {}
    assert ref.collect().to_pylist() == batch.to_pylist()
    assert [len(part.collect()) for part in ref.split(2, "tokens")] == [1, 1]


def test_collecting_nothing_is_a_sentence():
    ref = InlineExecutor("cpu").put(columns([1], "prompt"))
    with pytest.raises(DataError, match="no columns"):
        ref.collect([])
    with pytest.raises(DataError, match="nothing to concatenate"):
        BatchRef.concat([])


def test_rows_that_are_kept_for_many_steps_do_not_pile_up():
    """A replay buffer: the best rows of all steps so far."""
    rows = [{"x": -1}, {"x": -2}]
    kept = shard_table(Batch.from_columns({"x": [-1, -2]}), [[0, 1]], known=True)
    for step in range(500):
        new = shard_table(Batch.from_columns({"x": [step, step + 1000]}), [[1], [0]], known=True)
        chosen = [3, 0, 2] if step % 3 else [1, 2]
        rows = [[*rows, {"x": step}, {"x": step + 1000}][row % 4] for row in chosen]
        kept = BatchRef.concat([kept, new]).take([row % 4 for row in chosen])
        kept, rows = kept.take([1, 0]), [rows[1], rows[0]]
    assert read(kept) == rows
    assert len(kept.node.shards()) <= 2
    assert len(pickle.dumps(kept.take([0]).node.known_rows)) < 100


def test_a_mask_needs_a_boolean_for_each_row_also_where_they_are_not_known():
    unknown = shard_table(columns([1, 2, 3], "prompt"), [[0, 1, 2]])
    assert [row["prompt_number"] for row in read(unknown.take([True, False, True]))] == [0, 2]
    with pytest.raises(DataError, match="mask of 2 booleans cannot choose among 3 rows"):
        read(unknown.take([True, False]))
    with pytest.raises(DataError, match="no row 7 of a batch of 3 rows"):
        read(unknown.take([7]))


def test_numbers_that_make_no_sense_are_refused():
    ref = InlineExecutor("cpu").put(columns([1, 2], "prompt"))
    for wrong in (
        lambda: ref.repeat(-1),
        lambda: ref.repeat(1.5),
        lambda: ref.split(0),
        lambda: ref.split(2, "token"),
        lambda: ref.apply(lambda rows: rows, ["prompt_ids"], together=-1),
        lambda: ref.apply(lambda rows: rows, ["prompt_ids"], on="actor"),
        lambda: ref.select(["prompt_ids"]),
    ):
        with pytest.raises(DataError, match=r"`(repeat|split|apply|select)"):
            wrong()
    assert ref.collect("prompt_number")["prompt_number"].tolist() == [0, 1]


def test_a_row_that_no_rank_made_is_a_sentence():
    hole = shard_table(columns([1, 2, 3], "prompt"), [[0], [2]], total=3)
    with pytest.raises(DataError, match="Row 1 of 3 was made by no rank"):
        read(hole)


def test_a_column_may_have_any_name():
    batch = Batch.from_columns({"acc[k=1]": [1.0], "*": [2.0]})
    ref = shard_table(batch, [[0]])
    for name in batch.columns:
        assert read(ref.select(name).for_reading(None, "a test"))[0].keys() == {name}


def test_columns_of_one_name_have_one_type_on_all_ranks():
    result = Stored(Batch.from_columns({"x": [1, 2]}), [[0], [1]])
    result.parts[1] = Batch.from_columns({"x": [["text"]]})
    with pytest.raises(DataError, match="columns of one name and different types"):
        read(BatchRef(ResultTable((result,))))

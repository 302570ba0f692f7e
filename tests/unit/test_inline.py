"""A worker group on the inline executor: calls, handles, records and errors, all in one process."""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.controller import (
    DP,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    UPDATE,
    BatchRef,
    Handle,
    InlineExecutor,
    Worker,
    WorkerContext,
    WorkerGroup,
    transfer,
)
from hybridrl.controller.group_call import BuildRequest, RankAssignment
from hybridrl.controller.worker_host import WorkerHost
from hybridrl.errors import ConfigError, DataError
from hybridrl.layout.rank_mesh import MeshCoordinate, RankMesh


class BrokenError(Exception):
    pass


class Attending(Worker):
    """The first of two ranks. For their model 10 tokens cost twice as much as ten times one."""

    def coordinates(self):
        return {"dp": MeshCoordinate(0, 2)}

    @property
    def attention_length(self):
        return 10.0

    @transfer(DP)
    def read_lengths(self, batch: Batch) -> list:
        return [batch.lengths("response_ids").tolist()]


class Scaler(Worker):
    """Multiplies; and does everything that a worker should not."""

    closed = 0

    def __init__(self, context, factor=2):
        super().__init__(context)
        self.factor = factor
        self.report(built=1)

    @transfer(DP)
    def scale(self, batch: Batch, extra: int = 0) -> Batch:
        with self.phase("score"):
            pass
        self.report(rows=len(batch), total=float(batch["x"].sum()))
        return Batch.from_columns({"y": batch["x"] * self.factor + extra})

    def own_rows(self):
        return np.array([2, 0])

    @transfer(ONE_TO_ALL, rows=own_rows)
    def read_own_rows(self, batch: Batch) -> list:
        return [batch["x"].tolist(), self.rows.tolist()]

    @transfer(DP)
    def add(self, left: Batch, right: Batch) -> Batch:
        return Batch.from_columns({"sum": left["x"] + right["y"]})

    @transfer(THREE_D_ALL_MICRO_DP)
    def lose_a_row(self, batch: Batch) -> Batch:
        return batch.slice(1, len(batch))

    @transfer(DP)
    def forget_the_batch(self, count: int = 1) -> Batch:
        return Batch.from_columns({"x": torch.ones(count)})

    @transfer(UPDATE)
    def update(self, batch: Batch) -> dict[str, float]:
        return {"loss": float(batch["x"].sum()), "factor": self.factor}

    @transfer(ONE_TO_ALL)
    def set_factor(self, factor: int) -> int:
        before, self.factor = self.factor, factor
        return before

    @transfer(DP, reads=("x",), makes=("y",))
    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns({"y": batch["x"] * 2})

    @transfer(DP, reads=("x",), makes=("y",), follows=lambda built: [built.get("by", "by")])
    def multiply(self, batch: Batch) -> Batch:
        by = batch["by"] if "by" in batch.columns else 1
        return Batch.from_columns({"y": batch["x"] * by})

    @transfer(DP)
    def return_nothing(self, batch: Batch) -> Batch:
        return None

    @transfer(DP)
    def fail(self, batch: Batch) -> Batch:
        raise BrokenError("as it was raised")

    def private(self):
        return "not for the driver"

    def close(self):
        Scaler.closed += 1


class MeshWorker(Worker):
    """Stands on two meshes."""

    def coordinates(self):
        mesh = RankMesh({"dp": 1, "pp": 1})
        return {**mesh.coordinates(self.context.rank), "rollout_dp": MeshCoordinate(0, 1)}

    @transfer(THREE_D_ALL_MICRO_DP)
    def echo(self, batch: Batch) -> Batch:
        return batch


@pytest.fixture
def executor():
    with InlineExecutor("cpu") as executor:
        yield executor


@pytest.fixture
def group(executor):
    return WorkerGroup(executor, "scaler", Scaler, [0], factor=3).ready()


@pytest.fixture
def batch():
    return Batch.from_columns({"x": torch.arange(4), "text": ["a", "b", "c", "d"]})


def test_calls_take_batches_and_references(group, executor, batch):
    scaled = group.scale(batch)
    assert isinstance(scaled, BatchRef) and len(scaled) == 4
    assert scaled.collect()["y"].tolist() == [0, 3, 6, 9]
    ref = executor.put(batch)
    assert group.scale(ref, 1).collect()["y"].tolist() == [1, 4, 7, 10]
    assert group.scale(batch=ref, extra=2).collect()["y"].tolist() == [2, 5, 8, 11]
    assert group.scale(ref.take([3, 1])).collect()["y"].tolist() == [9, 3]


def test_a_rank_may_say_itself_which_rows_it_reads(group, batch):
    assert group.read_own_rows(batch).get() == [[[2, 0], [2, 0]]]


def test_rows_are_dealt_by_what_they_cost_the_model_of_the_worker(executor):
    tokens = torch.arange(30)
    rows = Batch.from_columns({"response_ids": [tokens, *[tokens[:10]] * 6]})  # 120 and 6 x 20
    ranks = WorkerGroup(executor, "attending", Attending, [0]).ready()
    assert ranks.read_lengths(rows).get() == [[[30]]]


def test_columns_come_together_by_row(group, executor, batch):
    ref = executor.put(batch)
    ref |= group.scale(ref.select("x"))
    ref |= group.add(ref, ref)
    assert ref.collect(["sum", "text"]).to_pylist() == [
        {"text": text, "sum": 4 * x} for x, text in enumerate("abcd")
    ]


def test_the_rows_of_two_batches_go_together(executor, group, batch):
    left = executor.put(batch)
    right = executor.put(Batch.from_columns({"y": torch.arange(3)}))
    with pytest.raises(DataError, match=r"`scaler.add` was given batches of 3 and 4 rows"):
        group.add(left, right)
    unknown = right.apply(lambda rows: rows, ["y"])
    unknown.node.results[0].rows = None
    with pytest.raises(DataError, match=r"`scaler.add` was given batches of 4 and 3 rows"):
        group.add(left, unknown)


def test_what_is_no_batch_is_refused_where_it_is_given(executor, group, batch):
    ref = executor.put(batch)
    for hidden in ([ref], {"batch": (1, ref)}):
        with pytest.raises(DataError, match=r"`scaler.scale` was given a BatchRef inside another"):
            group.scale(ref, hidden)
    with pytest.raises(DataError, match="`put` takes a Batch, this is a dict"):
        executor.put({"x": [1]})
    with pytest.raises(DataError, match="`concat` takes BatchRefs, this is a Batch"):
        BatchRef.concat([ref, batch])
    with pytest.raises(DataError, match="goes through `put` first"):
        batch | ref
    with pytest.raises(DataError, match=r"`apply\(makes=\)` takes names of columns, not 3"):
        ref.apply(lambda rows: rows, ["x"], makes=3)
    with pytest.raises(DataError, match=r"`apply\(columns=\)` was given no columns"):
        ref.apply(lambda rows: rows, [])
    with pytest.raises(DataError, match="4 rows cannot be dealt out 3 at a time"):
        ref.apply(lambda rows: rows, ["x"], together=3)
    with pytest.raises(DataError, match=r"`y`, which no call has made yet; the batch has text, x"):
        ref.collect(["y"])
    assert len(BatchRef.concat(part for part in (ref, ref))) == 8


def test_a_method_gets_the_columns_that_it_reads(executor, group, batch):
    ref = executor.put(batch)
    doubled = group.double(ref.select("x", "text"))
    assert doubled.columns.certain == {"y"} and len(doubled) == 4
    with pytest.raises(DataError, match=r"`scaler.double` reads the column `x`, which no call"):
        group.double(doubled)
    with pytest.raises(DataError, match=r"`x`, which was not selected; those selected are text"):
        group.double(ref.select("text"))


def test_a_column_that_a_method_follows_comes_whatever_is_selected(executor, group, batch):
    """Where it is there: of joined, taken and concatenated tables, too."""
    ref = executor.put(batch)
    assert group.multiply(ref.select("x")).collect()["y"].tolist() == [0, 1, 2, 3]
    ref |= executor.put(Batch.from_columns({"by": torch.tensor([1, 10, 100, 1000])}))
    assert group.multiply(ref.select("x")).collect()["y"].tolist() == [0, 10, 200, 3000]
    ref = BatchRef.concat([ref.take([3, 1]), ref.take([2])])
    assert group.multiply(ref.select("x")).collect()["y"].tolist() == [3000, 10, 200]
    assert group.double(ref.select("x")).collect()["y"].tolist() == [6, 2, 4]


def test_a_result_has_the_columns_that_it_was_said_to_have(executor, group, batch):
    class Liar(Worker):
        @transfer(DP, makes=("y",))
        def more(self, batch: Batch) -> Batch:
            return Batch.from_columns({"y": batch["x"], "x": batch["x"] + 1})

        @transfer(DP, makes=("y",))
        def other(self, batch: Batch) -> Batch:
            return Batch.from_columns({"z": batch["x"]})

    liar, ref = WorkerGroup(executor, "liar", Liar, [0]), executor.put(batch)
    with pytest.raises(DataError, match=r"`liar.more` returned x, which is not among the columns"):
        liar.more(ref)
    with pytest.raises(DataError, match=r"`liar.other` says that it makes y, but returned z"):
        liar.other(ref)
    with pytest.raises(DataError, match=r"applied function <lambda> says that it makes y, but re"):
        ref.apply(lambda rows: rows, ["x"], makes=["y"])
    with pytest.raises(ConfigError, match=r"write \('y',\), a list of names"):
        transfer(DP, makes="y")(Liar.more)


def test_devices_are_numbers_of_the_cluster_each_once(executor):
    for wrong in ([0, 0], [-1], [9], []):
        with pytest.raises(ConfigError, match="name one or more of 0 to 0, each once"):
            WorkerGroup(executor, "wrong", Scaler, wrong)


def test_a_worker_that_cannot_be_closed_keeps_no_other_from_it():
    class Stays(Scaler):
        def close(self):
            raise BrokenError("it stays")

    before = Scaler.closed
    executor = InlineExecutor("cpu")
    WorkerGroup(executor, "first", Scaler, [0])
    WorkerGroup(executor, "second", Stays, [0])
    with pytest.raises(BrokenError):
        executor.close()
    assert Scaler.closed == before + 1


def test_two_groups_of_one_name_need_different_devices(executor, group):
    with pytest.raises(ConfigError, match="a group called `scaler` on device 0 already"):
        WorkerGroup(executor, "scaler", Scaler, [0], factor=5)


def test_what_is_no_batch_is_told_where_it_is_returned_or_joined(executor, group, batch):
    ref = executor.put(batch)
    with pytest.raises(DataError, match=r"`scaler.return_nothing` is annotated `-> Batch` but ret"):
        group.return_nothing(ref)
    with pytest.raises(DataError, match=r"function <lambda> returned a dict; it must return a Bat"):
        ref.apply(lambda rows: {"x": 1}, ["x"])
    with pytest.raises(DataError, match=r"can be joined with another only, this is a Handle"):
        ref | group.update(ref)
    with pytest.raises(DataError, match=r"`apply` of <lambda> reads the column `z`, which no call"):
        ref.apply(lambda rows: rows, ["z"])


def test_a_group_is_copied_as_other_objects_are(group):
    assert copy.copy(group).role == "scaler"
    assert not hasattr(group, "_nothing")


def test_records_that_nobody_takes_are_no_leak(executor, group, batch, monkeypatch):
    assert executor._records.maxlen
    executor._records = type(executor._records)(maxlen=10)
    for _ in range(30):
        group.update(batch)
    assert len(executor.take_records()) == 10


def test_a_batch_without_rows(group, executor, batch):
    nothing = group.scale(executor.put(batch).take([]))
    assert len(nothing) == 0 and nothing.collect()["y"].dtype == torch.int64


def test_other_results_come_in_handles(group, batch):
    handle = group.update(batch)
    assert isinstance(handle, Handle) and handle.done_within(0.0)
    assert handle.get() == {"loss": 6.0, "factor": 3}
    assert group.set_factor(5).get() == [3]
    assert group.update(batch).get()["factor"] == 5


def test_apply_runs_a_function_beside_the_data(executor, batch):
    class Negate:
        def __call__(self, batch):
            return Batch.from_columns({"minus": -batch["x"]})

    def shift(batch, by):
        assert batch.columns == ["x"]
        return Batch.from_columns({"shifted": batch["x"] + by})

    ref = executor.put(batch)
    ref |= ref.apply(lambda rows: Batch.from_columns({"double": 2 * rows["x"]}), ["x"])
    ref |= ref.apply(functools.partial(shift, by=10), ["x"])
    ref |= ref.apply(Negate(), ["x"])
    row = ref.take([3]).collect().to_pylist()
    assert row == [{"x": 3, "text": "d", "double": 6, "shifted": 13, "minus": -3}]
    assert [record.method for record in executor.take_records()] == ["<lambda>", "shift", "Negate"]


def test_apply_keeps_the_number_of_rows(executor, batch):
    with pytest.raises(DataError, match="made 1 rows of 4"):
        executor.put(batch).apply(lambda rows: rows.slice(0, 1), ["x"])


def test_records_tell_who_did_what(group, executor, batch):
    assert [(record.method, record.metrics) for record in executor.take_records()] == [
        ("__init__", {"built": 1})
    ]
    group.scale(batch)
    (record,) = executor.take_records()
    assert (record.role, record.rank, record.method) == ("scaler", 0, "scale")
    assert record.metrics == {"rows": 4, "total": 6.0}
    assert list(record.phases) == ["score"] and 0 <= record.phases["score"] < 1
    assert 0 < record.start <= record.end
    assert pickle.loads(pickle.dumps(record)) == record
    assert executor.take_records() == []
    group.update(batch).get()
    (record,) = executor.take_records()
    assert record.method == "update" and record.phases == {} and record.metrics == {}


def test_an_unknown_method_is_named_with_the_nearest(group):
    with pytest.raises(AttributeError, match=r"group `scaler` has no method `scael`.*`scale`\?"):
        group.scael(0)
    for name in ("private", "close", "context"):
        with pytest.raises(AttributeError, match=rf"no method `{name}` that the driver may call"):
            getattr(group, name)


def test_as_many_rows_go_out_as_went_in(group, batch):
    with pytest.raises(DataError, match=r"`scaler\.lose_a_row` returned 3 rows for 4"):
        group.lose_a_row(batch)
    with pytest.raises(
        DataError, match=r"`scaler\.forget_the_batch` returned a batch of 1 rows and was given none"
    ):
        group.forget_the_batch()
    assert len(group.forget_the_batch(0).collect()) == 0  # of no rows, none


def test_exceptions_reach_the_driver_as_they_are(group, batch):
    with pytest.raises(BrokenError, match=r"^as it was raised$") as caught:
        group.fail(batch)
    assert caught.traceback[-1].name == "fail"
    assert group.scale(batch).collect()["y"].tolist() == [0, 3, 6, 9]


def test_an_exception_while_building_reaches_the_driver(executor):
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        WorkerGroup(executor, "scaler", Scaler, [0], nonsense=1)


def test_two_roles_live_on_one_host(executor, group, batch):
    echo = WorkerGroup(executor, "echo", MeshWorker, [0])
    assert echo.echo(group.scale(batch)).collect()["y"].tolist() == [0, 3, 6, 9]


def test_a_record_names_the_rank_and_not_the_part_of_the_rows():
    host, part = WorkerHost(redirects=False), RankAssignment(index=1, parts=2)
    host.run(BuildRequest("echo", MeshWorker, {}), WorkerContext("echo", rank=3, world_size=4))
    assert host.make_record("echo", part, "echo").rank == 3
    assert host.make_record("driver", part, "<lambda>").rank == 1


def test_workers_are_closed_once():
    before = Scaler.closed
    with InlineExecutor("cpu") as executor:
        WorkerGroup(executor, "scaler", Scaler, [0])
        assert Scaler.closed == before
    assert Scaler.closed == before + 1


def test_there_is_one_device():
    assert [device.kind for device in InlineExecutor("cpu").cluster.devices] == ["cpu"]
    if not torch.accelerator.device_count():
        with pytest.raises(ConfigError, match="no GPU was found"):
            InlineExecutor("cuda")

"""Group calls over Ray hosts: what runs at the same time, what is reported, and what is kept."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RecoveryConfig
from hybridrl.controller import DP, ONE_TO_ALL, UPDATE, Worker, WorkerGroup, transfer
from hybridrl.controller.batch_ref import BatchRef
from hybridrl.errors import CallTimeoutError, ConfigError, DataError, WorkerError
from hybridrl.ray_backend import call_messages
from hybridrl.run.signals import SignalHandler

pytestmark = [pytest.mark.ray]
TWO = [0, 1]


class Scorer(Worker):
    """Does simple things, at the moment that a test chooses."""

    @transfer(DP, reads=("x",), makes=("y",))
    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns({"y": batch["x"] * 2})

    @transfer(DP, reads=("x",), makes=("z",))
    def wait_for_file(self, batch: Batch, path: str) -> Batch:
        _until(Path(path).exists)
        return Batch.from_columns({"z": batch["x"] * 3})

    @transfer(DP)
    def add(self, left: Batch, right: Batch) -> Batch:
        return Batch.from_columns({"sum": left["x"] + right["y"]})

    @transfer(DP)
    def fill(self, batch: Batch) -> Batch:
        """A megabyte by rank: too much to travel with the reply."""
        return Batch.from_columns({"big": [np.zeros(1 << 17)] * len(batch)})

    @transfer(DP, reads=("prompt_ids",))
    def lengths(self, batch: Batch) -> Batch:
        return Batch.from_columns({"n": batch.lengths("prompt_ids")})

    @transfer(DP)
    def tokens(self, batch: Batch) -> Batch:
        """A list of tensors, which is empty on a rank without rows."""
        return Batch.from_columns({"out_ids": [torch.arange(int(x)) for x in batch["x"]]})

    @transfer(UPDATE)
    def update(self, batch: Batch) -> float:
        return float(len(batch))

    @transfer(ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @transfer(ONE_TO_ALL)
    def sleep(self, seconds: float, rank: int | None = None) -> None:
        if rank in (None, self.context.rank):
            time.sleep(seconds)

    @transfer(ONE_TO_ALL)
    def fail(self) -> None:
        raise ValueError("no such luck")

    @transfer(ONE_TO_ALL)
    def give_a_lock(self) -> object:
        return threading.Lock()

    @transfer(ONE_TO_ALL)
    def raise_the_unspeakable(self) -> None:
        class Unspeakable(Exception):  # noqa: N818
            def __str__(self):
                raise RuntimeError

        raise Unspeakable


class Beside(Scorer):
    """Needs no device."""

    @classmethod
    def runs_beside(cls, keywords):
        return True


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def start(ray):
    """Starts executors of two hosts."""
    from hybridrl.ray_backend.ray_executor import RayExecutor

    started = []

    def start(timeout_s: float = 100.0, run_directory: Path | None = None):
        executor = RayExecutor(
            "cpu", 2, cpus_per_host=0.5, timeout_s=timeout_s, run_directory=run_directory
        )
        started.append(executor)
        return executor

    yield start
    for executor in started:
        executor.close()


def group(executor, role="scorer", devices=TWO):
    return WorkerGroup(executor, role, Scorer, devices).ready()


def numbers(count):
    return Batch.from_columns({"x": torch.arange(count)})


@pytest.mark.parametrize("way", ["direct", pytest.param("relayed", marks=pytest.mark.more)])
def test_a_role_that_runs_beside_others_does_not_wait_for_them(start, tmp_path, monkeypatch, way):
    if way == "relayed":
        monkeypatch.setattr("hybridrl.ray_backend.ray_executor.MAX_DIRECT_HOSTS", 0)
    executor = start()
    scorer, beside = group(executor), WorkerGroup(executor, "beside", Beside, TWO).ready()
    held = scorer.wait_for_file(executor.put(numbers(4)), str(tmp_path / "file"))
    doubled = beside.double(executor.put(numbers(4)))
    assert doubled.collect()["y"].tolist() == [0, 2, 4, 6]
    later = beside.double(held.apply(lambda batch: Batch.from_columns({"x": batch["z"]}), ["z"]))
    time.sleep(1.0)  # until it waits for rows of which the others know nothing yet
    (tmp_path / "file").touch()
    assert later.collect()["y"].tolist() == [0, 6, 12, 18]


@pytest.mark.more
def test_a_call_that_hangs_beside_others_is_named(start):
    executor = start(timeout_s=3.0)
    beside = WorkerGroup(executor, "beside", Beside, TWO).ready()
    with pytest.raises(CallTimeoutError, match=r"beside\.sleep on rank 1 did not finish"):
        beside.sleep(60.0, 1).get()


@pytest.mark.parametrize("way", ["direct", pytest.param("relayed", marks=pytest.mark.more)])
def test_calls_over_hosts(start, tmp_path, monkeypatch, way):
    """One executor for all that leaves it in order: starting one takes seconds."""
    if way == "relayed":
        monkeypatch.setattr("hybridrl.ray_backend.ray_executor.MAX_DIRECT_HOSTS", 0)
    executor = start()
    both, first, second = (
        group(executor),
        group(executor, "first", [0]),
        group(executor, "second", [1]),
    )
    _two_batches_are_cut_alike(executor, both)
    _fewer_rows_than_ranks(executor, both)
    _scorers_overlap(executor, first, second, tmp_path)
    _an_apply_is_shared(executor, both)
    _what_cannot_be_sent_is_a_sentence(executor, both)
    _an_interrupt_loses_no_reply(executor, both, monkeypatch)
    _nothing_is_kept(executor, both)


def _two_batches_are_cut_alike(executor, both):
    """Their own lengths would cut them differently."""
    left = executor.put(
        Batch.from_columns(
            {"x": torch.arange(4), "prompt_ids": [torch.zeros(n, dtype=int) for n in (9, 1, 1, 1)]}
        )
    )
    right = executor.put(
        Batch.from_columns(
            {
                "y": 10 * torch.arange(4),
                "response_ids": [torch.zeros(n, dtype=int) for n in (1, 1, 1, 9)],
            }
        )
    )
    assert both.add(left, right).collect()["sum"].tolist() == [0, 11, 22, 33]
    with pytest.raises(DataError, match="batches of 3 and 4 rows"):
        both.add(left, right.take([0, 1, 2]))


def _fewer_rows_than_ranks(executor, both):
    for count in (0, 1, 2, 3):
        ref = executor.put(numbers(count))
        assert both.double(ref).collect()["y"].tolist() == [2 * x for x in range(count)]
        assert both.update(ref).get() >= 0
        found = both.tokens(ref).collect()
        assert [row.tolist() for row in found.ragged("out_ids").rows()] == [
            list(range(x)) for x in range(count)
        ]
        ragged = {"prompt_ids": [torch.arange(n + 1) for n in range(count)]}
        ref = executor.put(Batch.from_columns(ragged | {"x": torch.arange(count)}))
        assert both.lengths(ref).collect()["n"].tolist() == list(range(1, count + 1))
        for part in ref.split(4):
            both.update(part).get()
            both.lengths(part).collect()


def _scorers_overlap(executor, first, second, tmp_path):
    """A call that reads nothing of an earlier one does not wait for it, though the batch has its
    columns; nor does a collect or an apply."""
    gate = tmp_path / "gate"
    batch = executor.put(numbers(4))
    batch |= first.wait_for_file(batch, str(gate))
    batch |= second.double(batch)
    assert batch.collect(["y"])["y"].tolist() == [0, 2, 4, 6]
    assert len(batch) == 4
    gate.touch()
    assert batch.collect(["z"])["z"].tolist() == [0, 3, 6, 9]


def _an_apply_is_shared(executor, both):
    batch = executor.put(numbers(6))

    def seen(rows: Batch) -> Batch:
        return Batch.from_columns({"seen": [len(rows)] * len(rows)})

    assert batch.apply(seen, ["x"]).collect()["seen"].tolist() == [6] * 6
    assert batch.apply(seen, ["x"], on=both).collect()["seen"].tolist() == [6] * 6
    shared = batch.apply(seen, ["x"], on=both, together=2)
    assert shared.collect()["seen"].tolist() == [2, 2, 4, 4, 4, 4]


def _what_cannot_be_sent_is_a_sentence(executor, both):
    with pytest.raises(DataError, match=r"The call scorer\.sleep cannot be sent: .*lock"):
        both.sleep(threading.Lock())
    executor.settle()


def _an_interrupt_loses_no_reply(executor, both, monkeypatch):
    """Between a reply's arrival and the note of it."""
    handle, note = both.process(), executor._note

    def interrupted(events):
        monkeypatch.setattr(executor, "_note", note)
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "_note", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.get()
    assert len(set(handle.get())) == 2
    executor.settle()


def _nothing_is_kept(executor, both):
    """Of calls whose batch nobody waits for: the store is empty when the batch is forgotten."""
    batch = executor.put(numbers(2))
    begin = None
    for step in range(40):
        both.fill(batch)
        both.update(batch).get()
        if step == 9:
            begin = _objects_in_store()
    both.update(batch).get()
    gc.collect()
    _until(lambda: _objects_in_store() <= begin + 4, seconds=20)
    assert len(executor._pending) <= 2


def _objects_in_store() -> int:
    import ray
    from ray._private.internal_api import memory_summary

    address = ray.get_runtime_context().gcs_address
    summary = memory_summary(address, stats_only=True)
    return int(re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)[1])


def test_a_failure_that_nobody_asks_about_is_reported(start):
    executor = start()
    scorer = group(executor)
    scorer.fail()
    with pytest.raises(WorkerError, match=r"scorer\.fail failed on rank .: ValueError: no such lu"):
        scorer.process().get()


@pytest.mark.more
def test_a_failure_that_nobody_asks_about_is_reported_at_the_end(start):
    with pytest.raises(WorkerError, match="no such luck"), start() as executor:
        group(executor).fail()


def test_calls_under_way_are_finished_at_the_end(start, tmp_path):
    with start() as executor:
        scorer = group(executor)
        threading.Timer(1.0, (tmp_path / "gate").touch).start()
        scorer.wait_for_file(executor.put(numbers(2)), str(tmp_path / "gate"))
    assert (tmp_path / "gate").exists()


@pytest.mark.more
def test_calls_that_are_cut_off_by_closing_are_told_of(start, caplog):
    executor = start()
    group(executor).sleep(60.0)
    executor.close()
    assert "before 1 call(s) were done (scorer.sleep)" in caplog.text


@pytest.mark.more
def test_ctrl_c_in_the_middle_of_a_send_leaves_no_rank_without_the_call(start, monkeypatch):
    """The ranks that had it would wait in it for the others, and nothing could be saved."""
    executor = start()
    scorer = group(executor)
    sent = []

    def join_header(*parts):
        if not sent:
            os.kill(os.getpid(), signal.SIGINT)
        sent.append(parts)
        return call_messages.join_header(*parts)

    monkeypatch.setattr("hybridrl.ray_backend.call_transport.join_header", join_header)
    with SignalHandler(RecoveryConfig()), pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        scorer.sleep(0.0)
    assert len(sent) == 2
    monkeypatch.undo()
    assert len(set(scorer.process().get())) == 2


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("give_a_lock", r"could not be sent to the driver(.|\n)*cannot pickle '_thread.lock'"),
        ("raise_the_unspeakable", ": Unspeakable\n"),
    ],
)
def test_odd_results_are_told_as_what_they_are(start, method, sentence):
    with pytest.raises(WorkerError, match=rf"scorer\.{method} failed on rank .(.|\n)*{sentence}"):
        getattr(group(start()), method)().get()


def test_a_call_that_one_rank_cannot_read_names_that_rank(start):
    scorer = group(start())
    _, second = scorer.process().get()

    def refuse(pid):
        if os.getpid() == pid:
            raise ImportError("no such module here")

    class Unreadable:
        def __reduce__(self):
            return refuse, (second,)

    said = r"^scorer\.sleep failed on rank 1: .*could not be read: ImportError: no such module here"
    with pytest.raises(WorkerError, match=said):
        scorer.sleep(0.0, Unreadable()).get()


def test_the_call_in_hand_and_the_rank_are_named_when_a_host_dies(start, tmp_path):
    (tmp_path / "logs").mkdir()
    executor = start(run_directory=tmp_path)
    other, late = group(executor, "other", [1]), group(executor, "late", [1])
    (victim,) = other.process().get()
    other.sleep(60.0)
    queued = [late.process() for _ in range(3)]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^other rank 0 \(.*died during other\.sleep") as error:
        queued[-1].get()
    assert "other-0.log" in str(error.value)


@pytest.mark.more
def test_a_deadline_counts_work_and_not_waiting(start):
    """Each call takes less than the limit, both after each other more."""
    executor = start(timeout_s=9.0)
    first, second = group(executor, "first", [0]), group(executor, "second", [1])
    batch = executor.put(numbers(2))
    made = batch.apply(_slowly, ["x"], makes=["slow"], on=first)
    second.sleep(0.0)
    again = (batch | made).apply(_slowly, ["x", "slow"], makes=["slow"], on=second)
    assert again.collect()["slow"].tolist() == [0, 1]


def _slowly(rows: Batch) -> Batch:
    time.sleep(5.0)
    return Batch.from_columns({"slow": rows["x"] * 1})


@pytest.mark.more
def test_a_reply_that_is_lost_is_noticed(start):
    executor = start(timeout_s=6.0)
    scorer = group(executor)
    handle = scorer.process()
    handle.get()
    executor._pending[handle._call.number] = handle._call
    handle._call.replies[1] = None  # as if it had never come
    with pytest.raises(CallTimeoutError, match=r"scorer\.process on rank 1(.|\n)*no host is work"):
        handle.get()


@pytest.mark.more
def test_a_start_that_fails_gives_back_what_it_reserved(ray, monkeypatch):
    from hybridrl.ray_backend.ray_executor import RayExecutor

    def fail(*_, **__):
        raise ConfigError("no")

    monkeypatch.setattr(RayExecutor, "_start_hosts", fail)
    for _ in range(4):  # more than there are cores
        with pytest.raises(ConfigError, match=r"^no$"):
            RayExecutor("cpu", 2, cpus_per_host=1.0, start_timeout_s=20)


@pytest.mark.more
def test_hosts_that_do_not_start_in_time_are_a_sentence(ray, monkeypatch):
    from hybridrl.ray_backend import connection as cluster
    from hybridrl.ray_backend.ray_executor import RayExecutor

    reserve = cluster.reserve_devices
    monkeypatch.setattr(
        cluster, "reserve_devices", lambda *arguments: reserve(*arguments[:3], 60.0)
    )
    with pytest.raises(WorkerError, match=r"2 host processes did not start within 0.05 s \(ray"):
        RayExecutor("cpu", 2, cpus_per_host=0.5, start_timeout_s=0.05)


@pytest.mark.more
def test_a_rank_of_many_fetches_little(monkeypatch):
    """What an update of a GRPO step fetches on one rank of 256: not the replies of all ranks."""
    from hybridrl.batch.call_record import CallRecord
    from hybridrl.controller.group_call import ExpectedColumns, RankReply, ShardInfo
    from hybridrl.controller.row_selections import PartitionSelection
    from hybridrl.controller.table_expression import ResultTable
    from hybridrl.ray_backend import remote_result
    from hybridrl.ray_backend.remote_result import HostLocality, RemoteResult, ResultRefs

    ranks, per_rank, fetched = 256, 8, []
    rows = ranks * per_rank

    class Store:
        def get(self, references, timeout=None):
            fetched.append(references)
            return references

    monkeypatch.setattr(remote_result, "ray", Store())
    lengths = np.random.default_rng(0).integers(20, 400, rows)

    def result(blocks, **columns):
        batch = Batch.from_columns(columns)
        shards = [batch.take(block) for block in blocks]
        replies = [
            RankReply(CallRecord("actor", 0, "call"), info=ShardInfo.of(shard, block))
            for shard, block in zip(shards, blocks, strict=True)
        ]
        known = ExpectedColumns(frozenset(columns))
        return BatchRef(
            ResultTable((RemoteResult(ResultRefs([replies], shards), known, rows, HostLocality()),))
        )

    def ragged(dtype):
        return [torch.zeros(int(n), dtype=dtype) for n in lengths]

    in_order = np.split(np.arange(rows), ranks)
    batch = result([np.arange(rows)], prompt_ids=ragged(torch.long))
    batch |= result(in_order, response_ids=ragged(torch.long), response_mask=ragged(torch.uint8))
    batch |= result(in_order, scores=torch.zeros(rows), response=["x"] * rows)
    balanced = [PartitionSelection(rank, ranks, "tokens").rows(batch.node) for rank in range(ranks)]
    for name in ("ref_log_probs", "log_probs"):
        batch |= result(balanced, **{name: ragged(torch.float32)})
    for name in ("advantages", "loss_weights"):
        batch |= result([np.arange(rows)], **{name: ragged(torch.float32)})
    learned = ("prompt_ids", "response_ids", "response_mask", "advantages", "loss_weights")
    read = batch.select(*learned, "log_probs", "ref_log_probs").for_reading(None, "a test")
    counts = []
    for rank in range(0, ranks, 15):
        fetched.clear()
        read.read(PartitionSelection(rank, ranks, "tokens"))
        counts.append(len(fetched))
    assert max(counts) <= 16, counts


def test_an_object_that_ray_forgets_is_asked_for_again(monkeypatch):
    """As Ray does where another thread has just done with the same object: a reference that was
    read before waits for good, and one read anew does not."""
    from hybridrl.ray_backend import remote_result
    from hybridrl.ray_backend.ray_import import ray

    forgotten, waits = "a reference", []

    class Store:
        exceptions = ray.exceptions

        def put(self, references):
            return ("put", references)

        def get(self, references, timeout=None):
            if references[0] == "put":
                return [f"{one}, anew" * (len(waits) > 2) or one for one in references[1]]
            waits.append(timeout)
            if forgotten in references:
                raise ray.exceptions.GetTimeoutError
            return [f"what {one} is of" for one in references]

    monkeypatch.setattr(remote_result, "ray", Store())
    assert remote_result.get_borrowed(("other",)) == ["what other is of"]
    found = remote_result.get_borrowed([forgotten])
    assert found == ["what a reference, anew is of"]
    assert waits[1:] == [2.0, 4.0, 8.0], "ever longer, for most are only late"


@pytest.mark.more
def test_from_another_node_come_only_the_wanted_rows(monkeypatch):
    """Unless the hosts of this node would together fetch more than the shard."""
    from hybridrl.batch.call_record import CallRecord
    from hybridrl.controller.group_call import UNKNOWN, RankReply, ShardInfo
    from hybridrl.ray_backend import remote_result
    from hybridrl.ray_backend.remote_result import HostLocality, RemoteResult, ResultRefs

    batch = Batch.from_columns({"x": torch.arange(100), "image": [b"0" * 1000] * 100})
    reply = RankReply(CallRecord("actor", 0, "call"), info=ShardInfo.of(batch, np.arange(100)))
    asked = []

    class Actor:
        class rows:  # noqa: N801
            @staticmethod
            def remote(shard, rows, names):
                asked.append((len(rows), names))
                return shard[0].select(names).take(rows)

    found = staticmethod(lambda x, timeout=None: x)
    monkeypatch.setattr(remote_result, "ray", type("Ray", (), {"get": found}))

    def read(nodes, rows, names):
        asked.clear()
        around = HostLocality([Actor] * len(nodes), nodes, here="a")
        result = RemoteResult(ResultRefs([reply], [batch], [len(nodes[1:])]), UNKNOWN, 100, around)
        found = result.read(0, np.asarray(rows), names)
        assert found.columns == names and found["x"].tolist() == rows
        return list(asked)

    every = ["x", "image"]
    assert read(["a", "b"], [3, 1], ["x"]) == [(2, ["x"])]
    assert read(["a", "b"], [3, 1], every) == [(2, every)]
    assert read(["a", "a"], [3, 1], every) == []
    assert read(["a", "b"], list(range(100)), every) == []
    assert read(["a"] * 8 + ["b"], list(range(20)), every) == []
    assert read([], [3, 1], every) == []

"""Figures of a step: what ranks report in one call and in many adds up, or the largest counts."""

import math
from types import SimpleNamespace

import pytest
import torch

from hybridrl.config.schema import RewardConfig
from hybridrl.controller import Context, Worker
from hybridrl.core.record import Record
from hybridrl.engine.weight_sync import SyncCost
from hybridrl.trainers.step_metrics import step_metrics
from hybridrl.workers.generation import report_compression, report_numbers, report_sync
from hybridrl.workers.generator import GeneratorWorker
from hybridrl.workers.reward import RewardWorker


def test_what_a_call_reports_twice_adds_up():
    worker = Worker(Context("actor", 0, 1))
    worker.report(samples=3, behind_max=2)
    worker.report(samples=4, behind_max=1)
    assert worker.record.metrics == {"samples": 7, "behind_max": 2}


def test_of_several_syncs_bytes_add_up_and_the_highest_peak_counts():
    worker = Worker(Context("generator", 0, 1))
    for received, peak in ((10, 5), (20, 7), (30, 6)):
        report_sync(worker, SyncCost(received, sent=0, peak=peak, redundant=1, buffer=0))
    found = worker.record.metrics
    assert (found["sync_received"], found["sync_redundant"], found["sync_peak"]) == (60, 3, 7)


def test_ranks_that_send_differences_say_how_much_had_changed():
    records = []
    for rank, seconds in enumerate((0.5, 0.25)):
        worker = Worker(Context("actor", rank, 2))
        cost = SyncCost(0, 9, 5, 1, 3, "delta", 10 * rank, 50, seconds, record=7)
        report_compression(worker, cost)
        records.append(worker.record)
    found = step_metrics(records, [], 1.0)
    assert found["sync/codec"] == 1 and found["sync/changed_share"] == 0.1
    assert found["sync/encode_seconds"] == 0.5 and found["sync/record_bytes"] == 14
    report_compression(worker := Worker(Context("actor", 0, 1)), SyncCost(0, 9, 5, 1, 3))
    found = step_metrics([worker.record], [], 1.0)
    assert found["sync/codec"] == 0 and "sync/changed_share" not in found


def test_parcels_that_were_damaged_are_counted_by_who_takes_them():
    cost = SyncCost(20, sent=0, peak=5, redundant=1, buffer=0, method="delta", repeated=2)
    worker = GeneratorWorker.__new__(GeneratorWorker)
    worker.context, worker.record = Context("generator", 0, 1), Record("generator", 0, "m")
    worker._channel = SimpleNamespace(unpack=lambda parcels: None, cost=cost)
    worker.load_weights("parcels", 3)
    report_compression(sender := Worker(Context("actor", 0, 1)), SyncCost(0, 9, 5, 1, 3, "delta"))
    found = step_metrics([worker.record, sender.record], [], 1.0)
    assert found["sync/repeated"] == 2 and found["sync/received_bytes"] == 20


def reported(rank, columns):
    """What a rank's reward worker says of its columns."""
    worker = RewardWorker.__new__(RewardWorker)
    worker._kind, worker._config = "reward", RewardConfig()
    worker.context, worker.record = Context("reward", rank, 2), Record("reward", rank, "m")
    report_numbers(worker, columns)
    return worker.record


def test_functions_and_their_further_numbers_have_means():
    records = [
        reported(0, {"reward/exact": [1.0, 0.0], "reward/exact/steps": [4.0, math.nan]}),
        reported(1, {"reward/exact": [0.0, math.nan], "reward/model": torch.tensor([2.0, 4.0])}),
        reported(1, {"reward/exact": []}),
    ]
    found = step_metrics(records, [], 1.0)
    assert found["reward/exact"] == pytest.approx(1 / 3)
    assert found["reward/exact/steps"] == 4.0 and found["reward/model"] == 3.0
    assert "reward/mean" not in found


def test_skipped_updates_are_counted():
    updates = [{"skipped_updates": 1.0}, {"skipped_updates": 1.0}, {"critic_skipped_updates": 0.0}]
    found = step_metrics([], updates, 1.0)
    assert found["policy/skipped_updates"] == 2.0 and found["critic/skipped_updates"] == 0.0

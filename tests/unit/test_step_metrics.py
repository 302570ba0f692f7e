"""Figures of a step: what ranks report in one call and in many adds up, or the largest counts."""

import math
from types import SimpleNamespace

import pytest
import torch

from hybridrl.batch.batch import Batch, sampled_tokens
from hybridrl.batch.call_record import CallRecord
from hybridrl.config.schema import RewardConfig
from hybridrl.controller import Worker, WorkerContext
from hybridrl.engine.micro_batches import UpdateMetrics
from hybridrl.job import worker_groups
from hybridrl.rewards.loading import parse_function_list
from hybridrl.run.step_metrics import compute_step_metrics
from hybridrl.run.step_runner import of_sampled
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.workers.generation import (
    report_column_sums,
    report_samples,
    report_weights_received,
    report_weights_sent,
)
from hybridrl.workers.generator_worker import GeneratorWorker
from hybridrl.workers.reward_worker import RewardWorker


def test_what_a_call_reports_twice_adds_up():
    worker = Worker(WorkerContext("actor", 0, 1))
    worker.report(samples=3, behind_max=2)
    worker.report(samples=4, behind_max=1)
    assert worker.record.metrics == {"samples": 7, "behind_max": 2}


def test_the_largest_value_of_a_step_may_be_negative():
    worker = Worker(WorkerContext("actor", 0, 1))
    worker.report(gap_max=-2.0)
    worker.report(gap_max=-1.5)
    assert worker.record.metrics == {"gap_max": -1.5}
    update = UpdateMetrics()
    gaps, mask = {"gap_max": torch.tensor([-3.0, -1.0, 9.0])}, torch.tensor([True, True, False])
    update.add(torch.tensor(0.0), gaps, mask, mask)
    assert update.reduce(None)["gap_max"] == -1.0
    nothing = UpdateMetrics()
    nothing.add(torch.tensor(0.0), gaps, torch.zeros(3, dtype=torch.bool), mask)
    assert nothing.reduce(None)["gap_max"] == 0.0


def test_garbage_that_is_reported_twice_is_left_to_the_driver():
    worker = Worker(WorkerContext("actor", 0, 1))
    for value in (None, [1], 10**400, 2.0, "text"):
        worker.report(mine=value, ok=1)
    assert worker.record.metrics == {"mine": "text", "ok": 5}


def test_of_several_syncs_bytes_add_up_and_the_highest_peak_counts():
    worker = Worker(WorkerContext("generator", 0, 1))
    for received, peak in ((10, 5), (20, 7), (30, 6)):
        report_weights_received(
            worker, SyncCost(received, sent=0, peak=peak, redundant=1, buffer=0)
        )
    found = worker.record.metrics
    assert (found["sync_received"], found["sync_redundant"], found["sync_peak"]) == (60, 3, 7)


def test_ranks_that_send_differences_say_how_much_had_changed():
    records = []
    for rank, seconds in enumerate((0.5, 0.25)):
        worker = Worker(WorkerContext("actor", rank, 2))
        cost = SyncCost(0, 9, 5, 1, 3, "delta", 10 * rank, 50, seconds, record=7)
        report_weights_sent(worker, cost)
        records.append(worker.record)
    found = compute_step_metrics(records, [], 1.0)
    assert found["sync/codec"] == 1 and found["sync/changed_share"] == 0.1
    assert found["sync/encode_seconds"] == 0.5 and found["sync/record_bytes"] == 14
    report_weights_sent(worker := Worker(WorkerContext("actor", 0, 1)), SyncCost(0, 9, 5, 1, 3))
    found = compute_step_metrics([worker.record], [], 1.0)
    assert found["sync/codec"] == 0 and "sync/changed_share" not in found


def test_parcels_that_were_damaged_are_counted_by_who_takes_them():
    cost = SyncCost(20, sent=0, peak=5, redundant=1, buffer=0, method="delta", repeated=2)
    worker = GeneratorWorker.__new__(GeneratorWorker)
    Worker.__init__(worker, WorkerContext("generator", 0, 1))
    worker._channel = SimpleNamespace(unpack=lambda parcels: None, cost=cost)
    worker.load_weights("parcels", 3)
    report_weights_sent(
        sender := Worker(WorkerContext("actor", 0, 1)), SyncCost(0, 9, 5, 1, 3, "delta")
    )
    found = compute_step_metrics([worker.record, sender.record], [], 1.0)
    assert found["sync/repeated"] == 2 and found["sync/received_bytes"] == 20


def reported(rank, columns):
    """What a rank's reward worker says of its columns."""
    worker = RewardWorker.__new__(RewardWorker)
    Worker.__init__(worker, WorkerContext("reward", rank, 2))
    worker._kind, worker._config = "reward", RewardConfig()
    report_column_sums(worker, columns)
    return worker.record


def test_functions_and_their_further_numbers_have_means():
    records = [
        reported(0, {"reward/exact": [1.0, 0.0], "reward/exact/steps": [4.0, math.nan]}),
        reported(1, {"reward/exact": [0.0, math.nan], "reward/model": torch.tensor([2.0, 4.0])}),
        reported(1, {"reward/exact": []}),
    ]
    found = compute_step_metrics(records, [], 1.0)
    assert found["reward/exact"] == pytest.approx(1 / 3)
    assert found["reward/exact/steps"] == 4.0 and found["reward/model"] == 3.0
    assert "reward/mean" not in found


def test_updates_weigh_by_their_tokens_and_counts_add_up():
    updates = [
        {"loss": 1.0, "tokens": 30.0, "mine/a": 3.0, "skipped_updates": 1.0},
        {"loss": 5.0, "tokens": 10.0, "skipped_updates": 1.0},
        {"critic_loss": 2.0, "critic_tokens": 1.0, "critic_skipped_updates": 0.0},
        {"critic_loss": 6.0, "critic_tokens": 3.0},
    ]
    found = compute_step_metrics([], updates, 1.0)
    assert found["policy/loss"] == 2.0 and found["policy/tokens"] == 40.0
    assert found["critic/loss"] == 5.0 and found["mine/a"] == 3.0
    assert found["policy/skipped_updates"] == 2.0 and found["critic/skipped_updates"] == 0.0


@pytest.mark.parametrize("updates", [[{"loss": 1.0, "tokens": 0.0}, {"loss": 3.0, "tokens": 0.0}]])
def test_updates_of_no_tokens_weigh_the_same(updates):
    assert compute_step_metrics([], updates, 1.0)["policy/loss"] == 2.0
    assert (
        compute_step_metrics([], [{"loss": 1.0}, {"loss": 3.0, "tokens": 9.0}], 1.0)["policy/loss"]
        == 2
    )


def test_returns_of_larger_updates_weigh_more_in_what_values_explain():
    # Returns 0 and 2 in one update, 4 in the other: mean 2, variance 8 / 3; errors 1, 1 and 0.
    both = {"critic_return": 1.0, "critic_return_square": 2.0, "critic_error_square": 1.0}
    one = {"critic_return": 4.0, "critic_return_square": 16.0, "critic_error_square": 0.0}
    found = compute_step_metrics(
        [], [both | {"critic_tokens": 2.0}, one | {"critic_tokens": 1.0}], 1.0
    )
    assert found["critic/explained_variance"] == pytest.approx(1 - (2 / 3) / (8 / 3))


def test_mismatch_is_of_the_first_update():
    def update(scale):
        return {
            **{"mismatch_kl": 0.1 * scale, "mismatch_k3": 0.2 * scale, "mismatch_abs_max": scale},
            **{"mismatch_ppl_ratio": 1.0 + scale, "mismatch_weight": 0.5},
            **{"mismatch_weight_square": 0.4 * scale, "tokens": 100.0 * scale},
        }

    found = compute_step_metrics([], [{"critic_loss": 1.0}, update(1.0), update(9.0)], 1.0)
    assert found["mismatch/k3"] == 0.2 and found["mismatch/max_abs"] == 1.0
    assert found["mismatch/kl"] == 0.1 and found["mismatch/ppl_ratio"] == 2.0
    assert found["mismatch/ess"] == pytest.approx(0.25 / 0.4)


def samples_with_tools():
    """Of two rows: the second has a tool's tokens, the first a branch before its last."""
    ids = [[5, 6, 7], [5, 6, 7, 8, 9]]
    masks = [[1, 1, 1], [1, 0, 0, 0, 1]]
    return Batch.from_columns(
        {
            "response_ids": [torch.tensor(row) for row in ids],
            "response_mask": [torch.tensor(row, dtype=torch.uint8) for row in masks],
            "branch_response_ids": [torch.tensor([5, 6, 7, 8]), torch.tensor([], dtype=torch.long)],
            "branch_response_mask": [
                torch.tensor([1, 1, 1, 0], dtype=torch.uint8),
                torch.tensor([], dtype=torch.uint8),
            ],
            "branches": [2, 1],
            "turns": [3, 2],
            "finish_reason": ["stop", "length"],
        }
    )


def test_lengths_and_throughput_count_what_was_sampled_in_all_branches():
    samples = samples_with_tools()
    assert sampled_tokens(samples).tolist() == [6, 2]
    worker = Worker(WorkerContext("actor", 0, 1))
    report_samples(worker, samples)
    found = compute_step_metrics([worker.record], [], 2.0)
    assert found["response/length_mean"] == 4.0 and found["response/length_max"] == 6
    assert found["response/tokens"] == 8 and found["response/observed_tokens"] == 4
    assert found["throughput/tokens_per_second"] == 4.0


def test_samples_that_are_kept_have_lengths_and_advantages_of_what_was_sampled():
    rows = Batch.from_columns(
        {
            "response_mask": [
                torch.tensor(row, dtype=torch.uint8) for row in ([1, 0, 1], [0, 0], [])
            ],
            "advantages": [torch.tensor(row) for row in ([2.0, 0.0, 4.0], [0.0, 0.0], [])],
            "prompt": ["a", "dropped", "empty"],
        }
    )
    found = of_sampled(rows)
    assert found["tokens"].tolist() == [2, 2, 0] and "response_mask" not in found
    assert found["advantage"][0] == 3.0 and found["advantage"][1:].isnan().all()
    alone = Batch.from_columns({"prompt": ["a"]})
    assert of_sampled(alone) is alone


def call(number, **metrics):
    return CallRecord("any", 0, "method", metrics=metrics, call=number)


DRAWN = [
    call(1, samples=2, response_tokens=6, response_tokens_max=4, truncated=0, sync_received=1),
    call(2, samples=1, response_tokens=9, response_tokens_max=9, truncated=1, sync_received=1),
    call(3, reward_count=2, reward_sum=1.0, reward_square_sum=1.0, reward_correct=1),
    call(4, reward_count=1, reward_sum=5.0, reward_square_sum=25.0, reward_correct=1, repeated=0),
    call(5, behind_sum=4, behind_rows=2, behind_max=3),
]


def test_samples_beside_those_of_the_step_have_figures_of_their_own():
    of = {"reward_dropped": 0, "reward_failures": 0, "reward_timeouts": 0}
    for record in DRAWN[2:4]:
        record.metrics |= of
    found = compute_step_metrics(DRAWN, [], 3.0, {1: "", 3: "", 2: "greedy", 4: "greedy"})
    assert found["reward/mean"] == 0.5 and found["greedy/reward/mean"] == 5.0
    assert found["response/length_mean"] == 3.0 and found["greedy/response/length_mean"] == 9.0
    assert found["response/truncated"] == 0.0 and found["response/tokens"] == 6
    # What the machines did is of the step, whatever it was for.
    assert found["throughput/tokens_per_second"] == 5.0 and found["sync/received_bytes"] == 2
    assert found["staleness/mean"] == 2.0
    unnamed = compute_step_metrics(DRAWN, [], 3.0, {1: "", 3: ""})
    assert unnamed["other/reward/mean"] == 5.0 and unnamed["reward/mean"] == 0.5


def test_samples_count_as_the_steps_where_its_rows_are_of_no_call():
    found = compute_step_metrics(
        DRAWN, [], 3.0, {1: ""}
    )  # what is learned from came from the driver
    assert found["reward/mean"] == 2.0 and found["response/length_mean"] == 3.0
    assert compute_step_metrics(DRAWN, [], 3.0)["response/length_mean"] == 5.0


def test_only_rewards_that_are_known_to_need_no_device_run_beside_others():
    class WithOwnModel(RewardWorker):
        """Loads a model of its own in `compute_reward`."""

    assert RewardWorker.runs_beside({"model": None, "judge": None})
    assert not RewardWorker.runs_beside({"model": "folder", "judge": None})
    assert not WithOwnModel.runs_beside({"model": None, "judge": None})


@pytest.mark.parametrize(
    ("settings", "gains"),
    [
        ({"function": "exact"}, False),
        ({"function": ["exact", "format"], "options": {"format": {"pattern": "x"}}}, False),
        ({"function": "exact", "check": "math"}, True),
        ({"function": "{file}:of_row"}, True),
        ({"function": ["exact", "{file}:of_row"]}, True),
        ({"function": "{file}:of_prompt"}, False),
        ({"function": "{file}:of_rank"}, False),
        ({"function": None, "model": "folder"}, False),
    ],
)
def test_samples_leave_in_parts_where_functions_that_take_time_score_them_by_themselves(
    tmp_path, settings, gains
):
    """Functions in TRL's shape are promised all samples of a rank."""
    (tmp_path / "own.py").write_text(
        "def of_row(prompt, response, answer, **row): ...\n"
        "def of_prompt(prompt, responses, **row): ...\n"
        "def of_rank(prompts, completions, **columns): ...\n"
    )
    listed = settings["function"]
    named = [one.format(file=tmp_path / "own.py") for one in parse_function_list(listed)]
    config = RewardConfig(**{**settings, "function": named})
    for kind in ("reward", "cost"):
        built = {"kind": kind, "config": config, "model": config.model, "judge": None}
        group = SimpleNamespace(worker_class=RewardWorker, keywords=built)
        assert worker_groups._gains_by_parts(group) == gains


def test_the_hit_rate_of_a_cache_is_of_all_calls_of_a_step():
    first, second = (Worker(WorkerContext("reference", rank, 2)) for rank in range(2))
    first.report(cache_log_probs_asked=6, cache_log_probs_hits=3, cache_verdicts_asked=0)
    second.report(cache_log_probs_asked=4, cache_log_probs_hits=4)
    metrics = compute_step_metrics([first.record, second.record], [], 1.0)
    rates = {name: value for name, value in metrics.items() if name.startswith("cache")}
    assert rates == {"cache/log_probs_hit_rate": 0.7}

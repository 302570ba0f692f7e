"""Which steps are bad, where it was seen, and when a run is to end."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from watching import finished, watched

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import IN_COLUMN, IN_WEIGHT, CallRecord, NonFiniteValue
from hybridrl.config.schema import GuardConfig
from hybridrl.errors import TrainingError
from hybridrl.run.watchers.nan_guard import NanGuard, find_non_finite_column
from hybridrl.run.watchers.watcher import RewindRequest
from hybridrl.run_files.run_directory import RunDirectory

GOOD, SKIPPED = {"loss": 0.5, "skipped_updates": 0.0}, {"loss": math.nan, "skipped_updates": 1.0}
METRICS = {"policy/loss": 0.5, "policy/grad_norm": 1.0, "reward/mean": 0.1, "response/length": 2.0}
BAD = {**METRICS, "policy/loss": math.nan}


class Ref:
    """A batch that a step returned."""

    def __init__(self, **columns):
        self._batch = Batch.from_columns(columns)

    def collect(self):
        return self._batch


SAMPLES = Ref(
    group_id=torch.tensor([4, 4, 5, 5]),
    scores=torch.tensor([1.0, math.nan, -math.inf, 0.0]),
    advantages=[torch.tensor([math.nan])] * 4,
)


@pytest.fixture
def guard(tmp_path):
    return lambda **settings: NanGuard(GuardConfig(**settings), RunDirectory.at(tmp_path / "run"))


def bad_step(number, batch=SAMPLES):
    return finished(number, [], [SKIPPED], BAD, batch, range(4, 6))


def record(role, rank, *faults, start=0.0):
    return CallRecord(role, rank, "update", start=start, faults=list(faults))


def test_a_good_step_is_good(guard):
    assert guard().look(finished(3, [], [GOOD, {}], METRICS)) is None


@pytest.mark.parametrize("name", ["policy/loss", "reward/mean", "critic/grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_bad(guard, name, value):
    found = guard().look(finished(3, [], [GOOD], {**METRICS, name: value}))
    assert (found.metrics, found.skipped) == ([name], 0)


def test_what_was_first_wrong_is_named(guard):
    gradient, loss = NonFiniteValue(2, "the gradient of `a`"), NonFiniteValue(1, "its loss")
    records = [record("actor", 0, gradient), record("actor", 1, loss), record("critic", 0)]
    found = guard().look(finished(3, records, [SKIPPED, {"critic_skipped_updates": 1.0}], BAD))
    assert (found.skipped, found.where) == (2, "actor rank 1, in its loss")
    assert str(found) == "step 3: not finite: policy/loss; first seen by actor rank 1, in its loss."


def test_the_samples_are_kept_with_what_was_found(guard, tmp_path):
    said = watched(guard(), bad_step(12))
    path = tmp_path / "run" / "bad-steps" / "step-000012.parquet"
    assert pq.read_table(path).num_rows == 4
    told = json.loads(path.with_suffix(".json").read_text())
    assert (told["column"], told["rows"], told["skipped"]) == ("scores", [2], 1)
    assert told["all_metrics"]["policy/loss"] is None and told["metrics"] == ["policy/loss"]
    assert said == [
        "step 12: not finite: policy/loss; among the samples in `scores` of rows 2. The update was "
        f"left out. Its samples are in {path}."
    ]


def test_so_many_in_a_row_end_the_run(guard):
    found = guard(most_skipped=3)
    for step, update in enumerate((SKIPPED, SKIPPED, GOOD, SKIPPED, SKIPPED)):
        metrics = BAD if update is SKIPPED else METRICS
        watched(found, finished(step, [], [update], metrics, SAMPLES))
    with pytest.raises(TrainingError, match=r"Now 3 updates in a row .*guard\.most_skipped"):
        watched(found, bad_step(5))


def test_counts_survive_a_resume_but_not_a_way_back(guard):
    def skipped(found, *values):
        found.look(finished(1, [], [{"skipped_updates": value} for value in values]))

    before = guard(on_nan="rewind")
    skipped(before, 0.0, 1.0, 1.0)
    before.on_rewind(RewindRequest(3, []), 2)
    skipped(before, 1.0)
    state = json.loads(json.dumps(before.state()))
    after = guard(on_nan="rewind")
    after.load_state(state)
    assert after.state() == state == before.state()
    in_a_row = {"skipped_updates": 1}
    assert state == {"made": 1, "left_out": 3, "in_a_row": in_a_row, "rewinds": {"2": 1}}
    after.on_rewind(RewindRequest(3, []), 2)
    after.load_state(state)  # of the checkpoint that it went back to
    assert after.state()["rewinds"] == {"2": 2}


def test_stop_ends_the_run(guard):
    found = guard(on_nan="stop")
    with pytest.raises(TrainingError, match=r"step 1: not finite.*bad-steps.*guard\.on_nan=stop"):
        watched(found, bad_step(1))


def test_rewind_leaves_out_the_prompts_that_are_known_to_be_bad(guard):
    found = guard(on_nan="rewind", most_skipped=2)
    with pytest.raises(RewindRequest) as caught:
        watched(found, bad_step(7))
    assert caught.value.groups == [5]
    with pytest.raises(RewindRequest) as caught:
        watched(found, bad_step(7, Ref(group_id=torch.tensor([4, 5]))))
    assert list(caught.value.groups) == [4, 5]
    for _ in range(2):
        found.on_rewind(caught.value, 6)
    found.on_rewind(caught.value, 9)
    with pytest.raises(TrainingError, match=r"back to the checkpoint of step 6 2 times"):
        found.on_rewind(caught.value, 6)


def test_what_is_not_learned_from_may_be_anything():
    batch = Batch.from_columns(
        {
            "response_mask": [torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([0, 1]).byte()],
            "advantages": [torch.tensor([0.0, math.nan]), torch.tensor([math.inf, 1.0])],
            "scores": torch.tensor([math.nan, 1.0]),
            "mine": torch.tensor([math.nan, 1.0]),
        }
    )
    assert find_non_finite_column(batch) == ("", [])
    assert find_non_finite_column(Batch.from_columns({"scores": torch.zeros(0)})) == ("", [])


def test_a_run_that_left_out_every_update_fails(guard):
    left_out, mixed, nothing = guard(), guard(), guard()
    for _ in range(2):
        left_out.look(bad_step(1))
        mixed.look(finished(1, [], [SKIPPED, GOOD], BAD))
    with pytest.raises(TrainingError, match=r"All 2 updates .* nothing was learned"):
        left_out.on_run_end()
    mixed.on_run_end()
    nothing.on_run_end()


def test_a_weight_that_is_no_number_ends_the_run_at_once(guard):
    seen = [
        record("actor", 1, NonFiniteValue(IN_COLUMN, "a column")),
        record("actor", 0, start=9.0),
    ]
    seen[1].faults.append(NonFiniteValue(IN_WEIGHT, "the weight `a.b` itself"))
    bad = bad_step(3)._replace(records=seen)
    found = guard().look(bad)
    assert found.in_weights and found.where == "actor rank 0, in the weight `a.b` itself"
    with pytest.raises(TrainingError, match=r"weight `a\.b`.*another model.*earlier checkpoint"):
        watched(guard(), bad)
    with pytest.raises(RewindRequest):
        watched(guard(on_nan="rewind"), bad)

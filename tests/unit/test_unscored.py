"""Samples without a score: told of once, and the end of a run that has no others."""

import math

import pytest
from watching import finished, watched

from hybridrl.batch.call_record import CallRecord
from hybridrl.errors import RewardError
from hybridrl.run.watchers.unscored_samples import UnscoredSamplesWatcher
from hybridrl.run.watchers.watcher import FinishedEvaluation
from hybridrl.run_files.metric_writers import RunSummary


def record(kind="reward", scored=0, dropped=0, notice="", role=None):
    metrics = {f"{kind}_count": scored, f"{kind}_dropped": dropped}
    return CallRecord(
        role or kind, 0, "compute_reward", notices=[notice][: bool(notice)], metrics=metrics
    )


def at_step_0(records):
    return FinishedEvaluation(0, {}, {"evaluation at step 0": records})


def test_what_is_scored_is_not_spoken_of():
    assert watched(UnscoredSamplesWatcher(), finished(1, [])) == []
    assert (
        watched(
            UnscoredSamplesWatcher(),
            finished(1, [CallRecord("actor", 0, "update"), record(scored=4)]),
        )
        == []
    )


def test_remarks_are_shown_once_as_they_are_and_hide_no_failure():
    unscored = UnscoredSamplesWatcher()
    played = record("reward", scored=2, role="actor")
    played.remarks += ["A program reported no reward.", "A program reported no reward."]
    assert watched(unscored, finished(1, [played])) == ["step 1: A program reported no reward."]
    played.notices.append("An episode failed (error)")
    (said,) = watched(unscored, finished(2, [played]))
    assert said.startswith("step 2: An episode failed (error)\nThe run goes on")


def test_the_first_failure_of_each_role_is_told_once():
    unscored = UnscoredSamplesWatcher()
    some = [record(scored=3, dropped=1, notice="row 2: no"), record(scored=4, notice="row 1: no")]
    (said,) = watched(unscored, finished(1, some))
    assert said.startswith("step 1: row 2: no") and "reward.on_error" in said
    assert watched(unscored, finished(2, some)) == []
    (said,) = watched(
        unscored, finished(2, [record("cost", scored=1, notice="row 9", role="harm")])
    )
    assert "row 9" in said and "cost.on_error" in said and "`cost/failures`" in said


def test_ranks_without_a_score_do_not_matter_while_others_have_some():
    watched(UnscoredSamplesWatcher(), finished(1, [record(dropped=4), record(scored=1, dropped=3)]))


def test_functions_that_give_no_score_are_told_from_failures():
    with pytest.raises(RewardError, match=r"none of the 2 .*function returned None"):
        watched(UnscoredSamplesWatcher(), finished(1, [record(dropped=2)]))


@pytest.mark.parametrize("kind", ["reward", "cost"])
def test_none_scored_is_an_error_that_quotes_the_first_failure(kind):
    ranks = [record(kind, dropped=2), record(kind, dropped=3, notice="row 1: ValueError")]
    with pytest.raises(RewardError, match=f"evaluation at step 0: none of the 5 .*{kind}.on_error"):
        list(UnscoredSamplesWatcher(trains=False).on_evaluation(at_step_0(ranks)))
    with pytest.raises(RewardError, match="row 1: ValueError"):
        watched(UnscoredSamplesWatcher(), finished(1, ranks))


def test_an_evaluation_by_the_way_that_says_nothing_is_told_of():
    ranks = [record(dropped=2), record(dropped=3, notice="row 1: KeyError: {x}")]
    told = list(UnscoredSamplesWatcher().on_evaluation(at_step_0(ranks)))
    assert any("none of the 5 samples could be scored" in said for said in told)
    assert any("its figures say nothing. row 1: KeyError: {x}" in said for said in told)
    assert list(UnscoredSamplesWatcher().on_evaluation(at_step_0([record(scored=1)]))) == []


def test_the_summary_knows_figures_that_are_numbers():
    summary = RunSummary()
    for value in (math.nan, 0.5, 0.75):
        summary.record_metric("accuracy", value)
    assert summary == {"accuracy_first": 0.5, "accuracy_last": 0.75}
    summary.record_metric("accuracy", math.nan)
    assert summary["accuracy_last"] is None

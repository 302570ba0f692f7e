"""Where a step's time went adds up, and the last sentence of a run reads well."""

from pathlib import Path

import pytest

from hybridrl.batch.call_record import CallRecord
from hybridrl.config.schema import JudgeConfig, RewardConfig
from hybridrl.run.step_metrics import compute_phase_shares
from hybridrl.run_files.final_sentence import (
    format_final_sentence,
    interrupted_sentence,
    resolve_accuracy_name,
)


def call(role, rank, phases, method="run", start=0.0, end=1.0):
    return CallRecord(role, rank, method, start, end, phases)


def test_ranks_are_averaged_and_roles_add_up():
    records = [
        call("generator", 0, {"generate": 0.4}),
        call("generator", 1, {"generate": 0.6}),
        call("trainer", 0, {"train": 0.2, "score": 0.1}),
        call("trainer", 0, {"train": 0.1, "offload": 5.0}),
        call("trainer", 1, {"train": 0.1, "sync": 0.1}),
    ]
    result = compute_phase_shares(records, 2.0)
    assert {key: round(value, 9) for key, value in result.items()} == {
        "time/generate": 0.5,
        "time/score": 0.05,
        "time/train": 0.2,
        "time/sync": 0.05,
        "time/other": 1.2,
        "share/generate": 0.25,
        "share/score": 0.025,
        "share/train": 0.1,
        "share/sync": 0.025,
        "share/other": 0.6,
    }


def test_no_records_no_time_and_overlapping_roles():
    assert compute_phase_shares([], 2.0)["share/other"] == 1.0
    assert set(compute_phase_shares([], 0.0).values()) == {0.0}
    side_by_side = compute_phase_shares(
        [call("a", 0, {"generate": 1}), call("b", 0, {"train": 1})], 1.0
    )
    assert side_by_side["share/generate"] + side_by_side["share/train"] == 2.0
    assert side_by_side["share/other"] == 0.0


def test_the_last_sentence(tmp_path):
    summary = {
        "accuracy_first": 0.53,
        "accuracy_last": 0.86,
        "reward_first": 0.48,
        "reward_last": 0.84,
        "steps": 60,
        "seconds": 41.2,
    }
    (tmp_path / "model").mkdir()
    assert format_final_sentence(summary, tmp_path) == (
        "greedy accuracy 0.53 -> 0.86, reward 0.48 -> 0.84 in 60 steps (41.2 s); "
        f"model, metrics and report: {tmp_path}\n"
        f"next: open {tmp_path}/report.html"
    )
    assert format_final_sentence({"steps": 1, "reward_last": 0.5}, Path("x")).startswith(
        "reward 0.50 in 1 step; "
    )
    evaluation = format_final_sentence(
        {"steps": 0}, Path("runs/x")
    )  # trains no model and saves none
    assert evaluation.startswith("finished; metrics and report: runs/x\n")


@pytest.mark.parametrize(
    ("saved", "has_model", "where", "cure"),
    [
        (2, True, "model, metrics and report", "python -m hybridrl.main resume="),
        (0, True, "model, metrics and report", "model.path="),
        (0, False, "; metrics and report", ""),
    ],
)
def test_an_interrupted_run_says_where_its_model_is_and_how_to_go_on(
    tmp_path, saved, has_model, where, cure
):
    folder = tmp_path / "my run"
    (folder / "model" if has_model else folder).mkdir(parents=True)
    first, *rest = interrupted_sentence("Interrupted", 3, saved, folder).splitlines()
    assert (
        first.startswith("Interrupted after step 3; ") and where in first and str(folder) in first
    )
    assert rest[-1] == f"next: open '{folder}/report.html'"
    assert len(rest) == 1 + bool(cure) and cure in rest[0] and f"'{folder}" in rest[0]


def test_what_a_model_scores_is_no_accuracy():
    by_function, by_model, by_judge = (RewardConfig(correct_at=0.5) for _ in range(3))
    by_model.model, by_judge.judge = "rm", JudgeConfig(path="judge")
    assert resolve_accuracy_name(by_function) == "greedy accuracy"
    assert resolve_accuracy_name(by_function, short=True) == "accuracy"
    for reward in (by_model, by_judge):
        assert resolve_accuracy_name(reward) == "greedy responses (score >= 0.5)"
        assert resolve_accuracy_name(reward, short=True) == "score>=0.5"
    assert format_final_sentence(
        {"accuracy_last": 0.9}, Path("x"), resolve_accuracy_name(by_model)
    ).startswith("greedy responses (score >= 0.5) 0.90; ")

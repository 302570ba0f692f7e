"""What a report says of two runs beside each other."""

import json

import pytest

from hybridrl.report.run_summary import compared
from hybridrl.run_files.run_reader import open_run


def run_with(folder, metric, value, low, high, name="held_out"):
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    figure = {"value": value, "low": low, "high": high, "standard_error": 0.0}
    entry = {"step": 40, "sets": {name: {"metrics": {metric: figure}}}}
    written = {"format": 1, "evaluations": [entry]}
    (folder / "evaluations.json").write_text(json.dumps(written))
    return open_run(folder)


@pytest.mark.parametrize(
    ("metric", "values", "said"),
    [
        (
            "accuracy",
            [(0.7, 0.66, 0.74), (0.5, 0.45, 0.55)],
            "a is better by 0.2, which chance does",
        ),
        (
            "accuracy",
            [(0.5, 0.45, 0.55), (0.7, 0.66, 0.74)],
            "b is better by 0.2, which chance does",
        ),
        (
            "accuracy",
            [(0.5, 0.4, 0.6), (0.55, 0.45, 0.65)],
            "neither is better by more than chance",
        ),
        ("accuracy", [(0.0, 0.0, 0.2), (0.1, 0.0, 0.3)], "neither is better by more than"),
        ("loss", [(1.0, 0.98, 1.02), (2.0, 1.98, 2.02)], "a is better by 1, which chance"),
    ],
)
def test_the_better_of_two_runs_is_named_with_the_doubt(tmp_path, metric, values, said):
    runs = [run_with(tmp_path / n, metric, *v) for n, v in zip("ab", values, strict=True)]
    (sentence,) = compared(runs[0], runs[1:])
    assert sentence.startswith(f"held_out/{metric}: a ") and said in sentence, sentence


def test_runs_that_evaluated_other_sets_cannot_be_compared(tmp_path):
    one = run_with(tmp_path / "a", "accuracy", 0.5, 0.4, 0.6)
    two = run_with(tmp_path / "b", "accuracy", 0.5, 0.4, 0.6, name="math")
    assert compared(one, [two]) == ["a and b have no evaluation of the same set."]
    assert compared(one, []) == []

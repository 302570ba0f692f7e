"""The curves are drawn, at one size, from any number of lines."""

import pytest
from matplotlib.image import imread

from hybridrl.console.curves import draw_curves
from hybridrl.console.phase_colors import PHASES
from hybridrl.errors import StorageError
from hybridrl.run_files.metric_writers import JsonLines


def step_metrics(step):
    return {
        "reward/mean": 0.5 + step / 1000,
        "response/length_mean": 4.0,
        "policy/entropy": 1.0 / step,
        "policy/kl": 1e-3,
        **{f"time/{phase}": 0.1 for phase in PHASES},
    }


@pytest.mark.parametrize("count", [None, 1, 200])
def test_any_number_of_lines_gives_a_picture_of_one_size(tmp_path, count):
    metrics_file, out = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    if count is not None:
        writer = JsonLines(metrics_file)
        for step in range(1, count + 1):
            writer.write(step, step_metrics(step))
        writer.close()
    draw_curves(metrics_file, out)
    assert imread(out).shape[:2] == (800, 1200)


def test_only_evaluations_before_the_first_step(tmp_path):
    metrics_file, out = tmp_path / "metrics.jsonl", tmp_path / "curves.png"
    writer = JsonLines(metrics_file)
    for step, accuracy in ((-20, 0.1), (-10, 0.3), (0, 0.5)):
        writer.write(step, {"accuracy": accuracy})
    draw_curves(metrics_file, out)
    assert out.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(StorageError, match=r"missing/curves\.png"):
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / "missing" / "curves.png")

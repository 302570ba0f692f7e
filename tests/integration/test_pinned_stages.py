"""A job whose stages are kept to cores of their own (`resources=auto`)."""

import json
import os

import pytest

from hybridrl.job.config_resolution import load_config
from hybridrl.main import run
from hybridrl.run.watchers import core_isolation

MEASURED = ("time/", "share/", "throughput/", "memory/", "sync/")
SMALL = [
    *("devices=cpu", "warmup.steps=0", "model.tiny={hidden_size: 32, layers: 1, heads: 1}"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=8"),
    *("eval.prompts=4", "eval.every=0", "observe.samples_every=0", "observe.show_every=0"),
]
BURNING = """
import os
import time
from pathlib import Path

def score(prompt, response, **row):
    until, used = time.process_time() + 0.25, set()
    while time.process_time() < until:
        used.add(len(os.sched_getaffinity(0)))
    with Path(__file__).with_name("cores").open("a") as file:
        print(*used, file=file)
    return float(len(response) % 7)
"""


def figures_of(folder, *settings):
    """The metrics of steps, without what a machine took for them."""
    run(load_config([*SMALL, *settings, f"run.directory={folder}"]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["share/data"] < 1 for row in rows if "time/step" in row)
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


@pytest.mark.usefixtures("process_group")
def test_a_job_in_this_process_has_nothing_to_isolate(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(core_isolation, "WINDOW", 1)
    usable = os.sched_getaffinity(0)
    here = ["executor=inline", "rollout=transformers", "trainer.steps=3"]
    fixed = figures_of(tmp_path / "fixed", *here)
    assert "resources=auto" not in capsys.readouterr().out
    assert figures_of(tmp_path / "auto", *here, "resources=auto") == fixed
    assert "Nothing is pinned" in capsys.readouterr().out
    assert os.sched_getaffinity(0) == usable


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pins_of_hosts_change_no_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(core_isolation, "WINDOW", 1)
    monkeypatch.setattr(core_isolation, "LEAST_GAIN", -99.0)  # whatever it promises, or wins
    (tmp_path / "burning.py").write_text(BURNING)
    given = [f"reward.function={tmp_path}/burning.py:score", "num_devices=2", "trainer.steps=5"]
    # Long ones are generated while short ones are scored, which goes on after all are generated.
    given += ["rollout.max_tokens=64"]
    auto = figures_of(tmp_path / "auto", *given, "resources=auto")
    said = capsys.readouterr().out
    assert "workers 1, reward processes 1" in said
    assert "kept" in said
    used = (tmp_path / "cores").read_text().split()
    assert {"1", str(len(os.sched_getaffinity(0)))} <= {*used}  # in phases, and besides
    (tmp_path / "cores").unlink()
    assert figures_of(tmp_path / "fixed", *given) == auto
    assert "1" not in (tmp_path / "cores").read_text().split()

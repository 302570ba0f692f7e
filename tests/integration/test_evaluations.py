"""Jobs that are evaluated on sets of their own, inline and over Ray."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from settings import SHORT

from hybridrl import main
from hybridrl.job.config_resolution import load_config

INLINE = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.every=2", "eval.prompts=4", "observe.show_every=0", "observe.samples_every=0"),
]
MINE = """
def score(prompt, response, answer, *, least=0, **row):
    return float(len(response) >= least)

def evaluate(generate, score, rows, step):
    responses = generate(["1+1=", *rows], temperature=0, max_tokens=2)
    scores = score(["1+1=", *rows], responses, ["2"] * len(responses))
    return {"longest": max(map(len, responses)), "scores": len(scores), "step": step}
"""


@pytest.fixture
def sets(tmp_path):
    """Settings of a set with a verifier of its own, and of one that is a function."""
    mine, data = tmp_path / "mine.py", tmp_path / "easy.jsonl"
    mine.write_text(MINE)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "kind": "ab"[n % 2]} for n in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(f"eval.sets.easy.data.path={data}", "eval.sets.easy.samples=3"),
        *("eval.sets.easy.metrics=[accuracy,maj@k,pass@2,score]", "eval.sets.easy.max_tokens=5"),
        *(f"eval.sets.easy.reward.function={mine}:score", "eval.sets.easy.by_column=kind"),
        *("eval.sets.easy.reward.options.score.least=0", "eval.sets.easy.every=1"),
        *(f"eval.sets.own.function={mine}:evaluate", "eval.sets.own.at_start=false"),
    ]


def evaluations(folder):
    found = json.loads((folder / "evaluations.json").read_text())["evaluations"]
    return {entry["step"]: entry["sets"] for entry in found}


def check(folder, steps):
    """What both jobs leave."""
    found = evaluations(folder)
    assert {step: sorted(sets) for step, sets in found.items()} == steps
    last = max(steps)
    easy = found[last]["easy"]
    # Any response is long enough for the set's own verifier, and right for no other.
    assert easy["metrics"]["accuracy"]["value"] == easy["metrics"]["pass@2"]["value"] == 1
    assert easy["metrics"]["accuracy/a"]["prompts"] == 2
    assert easy["metrics"]["score"]["difference"]["p"] == 1 and easy["baseline"]["step"] == 0
    own = {name: one["value"] for name, one in found[last]["own"]["metrics"].items()}
    assert own["step"] == last and 0 <= own["longest"] <= 2
    table = pq.read_table(folder / easy["samples"])
    assert table.num_rows == 3 * (3 + 1) and {"response", "extracted"} <= set(table.column_names)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("eval/easy/maj@3" in row and row["step"] == last for row in metrics)
    return found


@pytest.mark.usefixtures("process_group")
def test_sets_beside_the_held_out_rows_and_an_early_end(sets, tmp_path, capsys):
    folder = tmp_path / "run"
    stop = ["eval.stop.metric=eval/easy/score", "eval.stop.patience=2", "trainer.steps=9"]
    main.run(load_config([*INLINE, *sets, *stop, "checkpoint.every=1", f"run.directory={folder}"]))
    steps = {0: ["easy", "held_out"], 1: ["easy"], 2: ["easy", "held_out", "own"]}
    check(folder, steps)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and "eval/easy/score was best at step 0" in summary["ended_early"]
    assert "easy/score" in summary["against_baseline"]
    said = capsys.readouterr().out
    assert "step 2: the run ends here" in said and "95%" in said
    # It goes on where it stopped if it is to be more patient, and knows what was best.
    main.run(load_config([f"resume={folder}", "eval.stop.patience=3"]))
    assert sorted(evaluations(folder)[3]) == ["easy", "held_out", "own"]
    # A step's folder is a model; the run is its baseline.
    model, alone = folder / "checkpoints" / "step-000003", tmp_path / "alone"
    asked = ["algorithm=evaluate", *INLINE[:2], "rollout.max_tokens=3", *sets]
    asked += [f"model.path={model}", f"eval.baseline={folder}", f"run.directory={alone}"]
    main.run(load_config(asked))
    found = json.loads((alone / "evaluations.json").read_text())["evaluations"]
    assert found[0]["model_step"] == 3 and sorted(found[0]["sets"]) == ["easy", "own"]
    accuracy = found[0]["sets"]["easy"]["metrics"]["accuracy"]
    assert accuracy["difference"]["test"] == "McNemar"
    # The command of the page: sets of other data alone, with no data of the job.
    only = ["algorithm=evaluate", *INLINE[:2], f"model.path={model}", "eval.sets.math.max_tokens=2"]
    easy = sets[0].partition("=")[2]
    capsys.readouterr()
    main.run(load_config([*only, f"eval.sets.math.data.path={easy}", f"run.directory={alone}2"]))
    summary = json.loads((tmp_path / "alone2" / "summary.json").read_text())
    (cut,) = [said for said in summary["evaluation_doubts"] if "ended at" in said]
    shown = capsys.readouterr().out
    assert "ended at eval.sets.math.max_tokens=2" in cut and cut in shown
    assert "finished; metrics and report: " in shown  # no model: it is not this run's
    assert "samples, 1 update(s)" not in shown


@pytest.mark.more
@pytest.mark.ray
def test_sets_over_ray(run, sets):
    overrides = ["rollout=transformers", "warmup.steps=0", "eval.every=2", "trainer.steps=1"]
    folder = run(*SHORT, *overrides, "placement=separation", *sets)
    check(folder, {0: ["easy", "held_out"], 1: ["easy", "held_out", "own"]})

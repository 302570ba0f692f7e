"""Figures of a run: of which samples and of which step they are, and that one name has one value
wherever it is written."""

import json
import math

import pyarrow.parquet as pq
import pytest

from hybridrl.console.console_choice import make_console
from hybridrl.errors import RewardError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.run import loop

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("process_group")]

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=5"),
    *("eval.prompts=6", "eval.every=0", "observe.samples_every=1", "trainer.steps=2"),
]
OWN = '''
from dataclasses import replace

import torch

from hybridrl.trainers import grpo


def odd(prompt, response, **row):
    return float(sum(map(ord, response)) % 7)


def until_update(prompt, response, updates, **row):
    return None if updates else 1.0


GARBAGE = {"mine/text": "abc", "mine/huge": 10**400, "mine/tensor": torch.zeros(3), "mine/ok": 1}


class Garbage(grpo.Trainer):
    """Whose updates, figures and evaluations have more than numbers in them."""

    def learn(self, batch, *columns):
        handles = super().learn(batch, *columns)
        for handle in handles:
            handle.get().update(GARBAGE)
        return handles

    def step(self):
        own = {"own/none": None, "own/ok": 2, "own/" + "x" * 1000: 1.0}
        return replace(super().step(), metrics=own)

    def evaluate(self, held_out):
        return super().evaluate(held_out) | {"eval/object": object()}


class Best(grpo.Trainer):
    """Draws twice, and learns from what it drew last; of its figures one is of its first step."""

    def step(self):
        self.samples()
        own = {} if self.steps else {"mine/first": 1.0}
        return replace(super().step(), metrics=own)
'''


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.fixture
def finish(tmp_path, own):
    """Runs a job in this process; gives its folder."""

    def run(*overrides):
        given = [*SMALL, f"run.directory={tmp_path / 'run'}", f"reward.function={own}:odd"]
        config = load_config([*given, *overrides])
        with make_console(1, "test") as view, Job(config) as job:
            loop.RunLoop(job, view).run()
        return job.directory.path

    return run


def steps_of(folder):
    """The figures of each step."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "time/step" in row]


def samples_of(folder, step, kind="samples"):
    return pq.read_table(folder / kind / f"step-{step:06d}.parquet").to_pylist()


def mean(values):
    values = list(values)
    return pytest.approx(math.fsum(values) / len(values))


@pytest.mark.parametrize(
    ("program", "beside"), [("algorithm=remax", "greedy"), ("trainer.name={own}:Best", "other")]
)
def test_figures_are_of_the_samples_that_are_learned_from(finish, own, program, beside):
    folder = finish(program.format(own=own))
    for row in steps_of(folder):
        samples = samples_of(folder, row["step"])
        assert row["reward/mean"] == row["reward/odd"] == mean(s["scores"] for s in samples)
        assert row["response/length_mean"] == mean(len(s["advantages"]) for s in samples)
        assert row["response/tokens"] == sum(len(s["advantages"]) for s in samples)
        assert row[f"{beside}/response/tokens"] > 0
        assert ("greedy/reward/mean" in row) == (beside == "greedy")
    generated = sum(
        row["response/tokens"] + row[f"{beside}/response/tokens"] for row in steps_of(folder)
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tokens_generated"] == generated


def test_a_figure_is_of_one_step(finish, own):
    first, second = steps_of(finish(f"trainer.name={own}:Best"))
    assert first["mine/first"] == 1.0 and "mine/first" not in second


def test_garbage_among_figures_costs_a_sentence_each_and_no_step(finish, own, capsys):
    folder = finish(f"trainer.name={own}:Garbage", "metrics=tensorboard")
    for row in steps_of(folder):
        assert {name: row[name] for name in row if name.startswith(("mine/", "own/"))} == {
            "mine/ok": 1.0,
            "own/ok": 2.0,
        }
    said = capsys.readouterr().out
    for words in (
        "`actor.update_actor` reported the metric 'mine/text', which is not a number (str)",
        "`actor.update_actor` reported the metric 'mine/huge', which is too large (int)",
        "`Garbage.step` reported the metric 'own/none', which is not a number (NoneType)",
        "whose name has 1,004 characters",
        "`Garbage.evaluate` reported the metric 'eval/object', which is not a number (object)",
    ):
        assert said.count(words) == 1, words


def test_tripwires_and_guard_go_on_in_a_resumed_run(finish, own, tmp_path):
    saves = ("checkpoint.every=2", f"reward.check={own}:odd")
    states = []
    for steps, further in ((2, []), (4, [f"resume={tmp_path / 'run'}"])):
        folder = finish(*saves, f"trainer.steps={steps}", *further)
        driver = folder / "checkpoints" / f"step-{steps:06d}" / "driver.json"
        states.append(json.loads(driver.read_text())["watches"])
    before, after = (state["tripwires"]["seen"]["reward/mean"] for state in states)
    assert before == after[:2] and len(after) == 4
    assert [state["guard"]["made"] for state in states] == [2, 4]


def test_a_step_without_a_score_leaves_its_figures(finish, own, tmp_path):
    with pytest.raises(RewardError, match="step 2: none of the 8 samples"):
        finish(f"reward.function={own}:until_update", "reward.on_error=drop")
    first, second = steps_of(tmp_path / "run")
    assert first["reward/mean"] == 1.0
    assert second["reward/dropped"] == 8 and "reward/mean" not in second

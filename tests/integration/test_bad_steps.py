"""Steps that are not finite, by a program of the user's: left out, the end, or taken back."""

import json
import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from tiers import few_of

from hybridrl.console.console_choice import make_console
from hybridrl.errors import ConfigError, TrainingError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.run import loop
from hybridrl.trainers import grpo

pytestmark = pytest.mark.usefixtures("process_group")

SMALL = [
    *("rollout=transformers", "devices=cpu", "warmup.steps=2"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=3", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "eval.every=2", "checkpoint.every=2", "observe.samples_every=1"),
    "trainer.steps=5",
]
BAD_STEP = 4
OWN = """
from dataclasses import replace
from pathlib import Path

from hybridrl.trainers import grpo, ppo

BAD = Path(__file__).with_name("bad.txt")

def odd(response, **row):
    return float(sum(map(ord, response)) % 7)

class Spoils:
    def learn(self, batch, *columns):
        def spoiled(rows):
            bad = BAD.read_text().splitlines() if BAD.exists() else []
            advantages = [
                row * float("nan" if prompt in bad else 1)
                for prompt, row in zip(rows["prompt"], rows["advantages"].rows())
            ]
            return rows.from_columns({"advantages": advantages})

        made = batch.apply(spoiled, ["prompt", "advantages"], makes=["advantages"])
        self.learned = batch | made
        return super().learn(self.learned, *columns)

    def step(self):
        return replace(super().step(), batch=self.learned)

class Spoiled(Spoils, grpo.Trainer):
    pass

class SpoiledPPO(Spoils, ppo.Trainer):
    pass
"""


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return [*SMALL, f"reward.function={file}:odd", f"trainer.name={file}:Spoiled"]


@pytest.fixture
def inline(tmp_path, settings):
    """Runs a job in this process; gives the folder, and what the console said."""

    def finish(name, *overrides):
        said = []
        config = load_config(
            [*settings, "executor=inline", f"run.directory={tmp_path / name}", *overrides]
        )
        with make_console(1, "test") as view:
            view.message = said.append
            with Job(config) as job:
                loop.RunLoop(job, view).run()
        return job.directory.path, said

    return finish


def prompts_of(folder, step):
    return pq.read_table(folder / "samples" / f"step-{step:06d}.parquet")["prompt"].to_pylist()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rewards_of(folder):
    return [row["reward/mean"] for row in rows_of(folder) if "reward/mean" in row]


def poison(folder):
    """Makes a prompt of the bad step one whose advantages are no numbers; gives it."""
    bad = prompts_of(folder, BAD_STEP)[0]
    before = [prompt for step in range(1, BAD_STEP) for prompt in prompts_of(folder, step)]
    assert bad not in before
    (folder.parent / "bad.txt").write_text(bad)
    return bad


def test_by_default_the_update_is_left_out_and_its_samples_kept(inline):
    plain, _ = inline("plain")
    bad = poison(plain)
    folder, said = inline("run")
    skipped = {row["step"]: row["guard/skipped"] for row in rows_of(folder) if "time/step" in row}
    assert skipped == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0}
    kept = folder / "bad-steps" / "step-000004.parquet"
    assert pq.read_table(kept)["prompt"].to_pylist() == prompts_of(plain, BAD_STEP)
    (told,) = [line for line in said if "not finite" in line]
    assert told.startswith("step 4: not finite: policy/")
    assert "first seen by actor rank 0, in the column `advantages`, row 0" in told
    assert f"The update was left out. Its samples are in {kept}." in told
    found = json.loads(kept.with_suffix(".json").read_text())
    assert found["column"] == "advantages" and found["rows"] == [0, 1]
    assert bad == prompts_of(folder, BAD_STEP)[0]


def test_stop_ends_the_run_with_a_sentence(inline):
    plain, _ = inline("plain", "trainer.steps=4")
    poison(plain)
    with pytest.raises(TrainingError, match=r"^step 4: not finite.*guard\.on_nan=stop"):
        inline("run", "guard.on_nan=stop")
    assert (plain.parent / "run" / "model").exists()


def takes_back(plain, run, every=2):
    """Runs with a bad prompt: the run goes back, and on without it."""
    bad = poison(plain)
    folder, said = run("run", "guard.on_nan=rewind", f"checkpoint.every={every}")
    rows = [row for row in rows_of(folder) if "time/step" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["guard/skipped"] == 0 and math.isfinite(row["policy/loss"]) for row in rows)
    before = prompts_of(plain, BAD_STEP)
    assert prompts_of(folder, BAD_STEP) == [prompt for prompt in before if prompt != bad]
    assert prompts_of(folder, BAD_STEP - 1) == prompts_of(plain, BAD_STEP - 1)
    (kept,) = (folder / "bad-steps").glob("*.parquet")
    assert bad in pq.read_table(kept)["prompt"].to_pylist()
    to = (BAD_STEP - 1) // every * every
    back = f"step 4: going back to the checkpoint of step {to}, without 1 prompts"
    assert said is None or back in said
    driver = folder / "checkpoints" / "step-000005" / "driver.json"
    assert len(json.loads(driver.read_text())["feed"]["left_out"]) == 1


@pytest.mark.parametrize("every", few_of([2, 10], [2]))
def test_rewind_goes_back_and_leaves_the_prompt_out(inline, every):
    """To a checkpoint, or, where there is none yet, to the beginning."""
    plain, _ = inline("plain")
    takes_back(plain, inline, every)


@pytest.mark.more
def test_what_was_taken_back_is_in_no_figure_of_the_run(inline):
    plain, _ = inline("plain", "trainer.steps=2")
    (plain.parent / "bad.txt").write_text(prompts_of(plain, 1)[0])
    rewind = ["guard.on_nan=rewind", "checkpoint.every=10", "trainer.steps=2"]
    folder, _ = inline("run", *rewind)
    first, before = (rewards_of(run)[0] for run in (folder, plain))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_first"] == first != before


@pytest.mark.more
def test_the_weight_of_the_kl_is_that_of_the_step_gone_back_to(inline, tmp_path):
    adaptive = ["algorithm=ppo", f"trainer.name={tmp_path / 'own.py'}:SpoiledPPO"]
    adaptive += ["algorithm.kl_coefficient=0.1", "algorithm.kl_in_reward=true"]
    adaptive += ["algorithm.kl_target=1e-5", "algorithm.kl_horizon=20", "eval.every=0"]

    def weights(name, *overrides):
        folder, _ = inline(name, *adaptive, *overrides)
        rows = [row for row in rows_of(folder) if "time/step" in row]
        return folder, [(row["step"], row["policy/kl_coefficient"]) for row in rows]

    plain, wanted = weights("plain")
    assert [step for step, _ in wanted] == [1, 2, 3, 4, 5]
    assert len({weight for _, weight in wanted}) == 5
    half, _ = weights("half", "trainer.steps=3")
    assert weights("half", f"resume={half}", "trainer.steps=5") == (half, wanted)
    poison(plain)
    folder, found = weights("run", "guard.on_nan=rewind")
    assert found[:4] == wanted[:4]
    saved = json.loads((folder / "checkpoints" / "step-000004" / "driver.json").read_text())
    assert found[4] == (5, saved["trainer"]["kl"]["coefficient"])


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rewind_over_ray(run, settings, tmp_path, monkeypatch, ranks):
    def on_hosts(name, *overrides):
        common = [f"num_devices={ranks}", "ray.address=auto", f"run.directory={tmp_path / name}"]
        return run(*settings, *common, *overrides), None

    plain, _ = on_hosts("plain")
    takes_back(plain, on_hosts)


@pytest.mark.more
def test_prompts_that_are_not_to_blame_are_no_way_out(inline, monkeypatch):
    """Every step after the checkpoint is bad: the run does not go round for ever."""
    step = grpo.Trainer.step

    def bad(self):
        return replace(step(self), metrics={"reward/mean": math.nan if self.steps > 2 else 0.0})

    monkeypatch.setattr(grpo.Trainer, "step", bad)
    with pytest.raises(TrainingError, match=r"back to the checkpoint of step 2 3 times"):
        inline("run", "guard.on_nan=rewind", "guard.most_skipped=3")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("guard.on_nan=pray", r"guard\.on_nan=pray: must be one of skip, stop, rewind"),
        ("guard.most_skipped=0", r"guard\.most_skipped=0: must be from 1 to 20"),
        ("guard.most_skipped=21", r"guard\.most_skipped=21: must be from 1 to 20"),
        ("checkpoint.every=0", r"guard\.on_nan=rewind without checkpoint\.every"),
    ],
)
def test_what_cannot_be_is_refused(inline, override, words):
    with pytest.raises(ConfigError, match=words):
        inline("run", "guard.on_nan=rewind", override)

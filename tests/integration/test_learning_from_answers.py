"""Programs that learn from the policy's own answers as data: pairs of them, or the best of them."""

import contextlib
import json
import math

import pyarrow.parquet as pq
import pytest
import torch

from hybridrl import Batch, Job, load_config
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.errors import TrainingError
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.run import loop
from hybridrl.trainers.expert_iteration import KEPT_COLUMNS

pytestmark = pytest.mark.usefixtures("process_group")

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=8", "rollout.samples_per_prompt=4", "rollout.max_tokens=3"),
    *("eval.prompts=8", "trainer.steps=3", "observe.show_every=0", "observe.samples_every=1"),
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
]


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(*overrides, **objects):
            is_own = any(one.startswith("model.path=") for one in overrides)
            small = [one for one in SMALL if not (is_own and one.startswith("model.tiny"))]
            config = load_config([*small, f"run.root={tmp_path}", *overrides])
            return stack.enter_context(Job(config, **objects))

        yield make


def run(job):
    """The whole loop; what it wrote of each step."""
    with make_console(1, "test") as view:
        loop.RunLoop(job, view).run()
    lines = (job.directory.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def samples(job, step=1):
    return pq.read_table(job.directory.path / "samples" / f"step-{step:06d}.parquet").to_pydict()


def is_one(prompt, response, **row):
    """A reward that a random model earns often: the answer begins with a one."""
    return float(response.startswith("1"))


def nothing(response):
    return 0.0


@pytest.mark.more
def test_online_dpo_learns_what_scores_best(start):
    job = start(
        *("algorithm=online_dpo", "trainer.steps=10"),
        *("data.prompts_per_step=32", "rollout.samples_per_prompt=8"),
        reward=is_one,
    )
    steps = run(job)
    assert steps[0]["pairs/prompts"] > 0
    assert steps[-1]["reward/mean"] > 2 * steps[0]["reward/mean"]


@pytest.mark.more
def test_online_dpo_of_samples_that_score_alike_has_no_pairs(start):
    steps = run(start("algorithm=online_dpo", reward=nothing))
    assert all(row["pairs/prompts"] == 0 for row in steps)


def test_expert_iteration_learns_from_each_right_answer_once(start):
    job = start(
        *("algorithm=expert_iteration", "trainer.steps=6"),
        *("data.prompts_per_step=16", "rollout.samples_per_prompt=32", "rollout.max_tokens=1"),
        reward=is_one,
    )
    steps = run(job)
    rows = samples(job)
    right = [
        (prompt, response)
        for prompt, response, score in zip(
            rows["prompt"], rows["response"], rows["scores"], strict=True
        )
        if score == 1
    ]
    assert steps[0]["expert/answers"] == len(set(right)) < len(right)
    assert steps[-1]["reward/mean"] > 2 * steps[0]["reward/mean"]


@pytest.mark.more
def test_expert_iteration_without_a_right_answer_goes_on(start):
    steps = run(start("algorithm=expert_iteration", reward=nothing))
    assert [row["expert/answers"] for row in steps] == [0, 0, 0]


def test_the_best_of_each_prompt_are_learned_from_a_score_that_nobody_calls_right(start):
    def length(response):
        return -len(response) / 10

    job = start(
        *("algorithm=expert_iteration", "expert.choose=best", "trainer.steps=8"),
        *("data.prompts_per_step=16", "rollout.samples_per_prompt=8"),
        reward=length,
    )
    steps = run(job)
    assert all(row["expert/answers"] == 16 for row in steps)
    assert steps[-1]["response/length_mean"] < 0.8 * steps[0]["response/length_mean"]


def test_answers_that_were_kept_survive_a_checkpoint(start):
    job = start("algorithm=expert_iteration", "trainer.steps=2", reward=is_one)
    run(job)
    trainer, ids = job.make_trainer(), torch.ones(2, 3, dtype=torch.int64)
    kept = Batch.from_columns(dict.fromkeys(KEPT_COLUMNS, ids))
    trainer.pool.extend([job.put(kept), job.put(kept.take([]))])
    state = json.loads(json.dumps(trainer.state()))
    again = job.make_trainer()
    again.load_state(state)
    assert again.state()["pool"] == state["pool"] == [kept.to_pylist(), []]
    batch, handles = again.step()
    assert len(batch) == 32 and handles[0].get()["tokens"] >= 6


@pytest.mark.more
def test_a_tripwire_ends_a_run_whose_reward_is_not_what_is_looked_at(start, tmp_path):
    path = tmp_path / "watched.py"
    path.write_text("def not_one(response, **row):\n    return float(response[:1] != '1')\n")
    job = start(
        *("algorithm=grpo", "trainer.steps=20", "data.prompts_per_step=32"),
        *(f"reward.check={path}:not_one", "guard.tripwires=3", "guard.on_tripwire=stop"),
        reward=is_one,
    )
    with pytest.raises(TrainingError, match="check/not_one, which is not rewarded, fell"):
        run(job)
    assert (job.directory.path / "model" / "model.safetensors").is_file()
    rows = samples(job)
    assert rows["scores"] == [1 - x for x in rows["check/not_one"]]


def test_steps_and_shorter_answers_are_learned_from(start):
    def digits(response):
        places = [n for n, c in enumerate(response, 1) if c.isdigit()]
        return {"score": float(len(response) == 3), "steps": [(n, 0.1) for n in places]}

    job = start(
        *("algorithm=grpo", "algorithm.step_credit=sum", "reward.shorter=0.2"),
        *("trainer.steps=2", "rollout.samples_per_prompt=8"),
        reward=digits,
    )
    steps = run(job)
    rows = samples(job)
    assert len(set(rows["shaped_scores"])) > 4
    assert rows["scores"] == pytest.approx(rows["reward/digits"])
    assert all(math.isfinite(row["policy/loss"]) for row in steps)
    mean = sum(map(float, rows["scores"])) / len(rows["scores"])
    assert steps[0]["reward/mean"] == pytest.approx(mean, rel=1e-5), "as it was measured"
    right = [outcome == 1 for outcome in rows["outcomes"]]
    assert right == [len(response) == 3 for response in rows["response"]]


@pytest.mark.more
def test_all_files_say_the_same_of_what_is_right(start):
    def at_the_bound(response):
        return {"score": 0.7 * response.startswith("1"), "steps": [(1, 5.0)][: len(response)]}

    job = start(
        *("algorithm=grpo", "algorithm.step_credit=sum", "reward.correct_at=0.7"),
        *("trainer.steps=1", "data.sampler=pass_rate", "data.prompts_per_step=32"),
        *("eval.samples=4", "eval.prompts=32", "eval.sets.more={samples: 4, prompts: 32}"),
        reward=at_the_bound,
    )
    (step,) = run(job)
    rows = samples(job)
    right = [response.startswith("1") for response in rows["response"]]
    assert 0 < step["reward/correct"] == sum(right) / len(right) < 0.5
    assert job.feed.deck.sampler._of_rows.sum(0).tolist() == [sum(right), len(right) - sum(right)]
    folder = job.directory.path
    told = {}  # by step
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        told.setdefault(json.loads(line)["step"], {}).update(json.loads(line))
    compared = 0
    for evaluation in json.loads((folder / "evaluations.json").read_text())["evaluations"]:
        for name, entry in evaluation["sets"].items():
            table = pq.read_table(folder / entry["samples"]).to_pydict()
            expected = [response.startswith("1") for response in table["response"]]
            assert table["correct"] == expected
            prefix = "eval/" if name == "held_out" else f"eval/{name}/"
            for metric, figure in entry["metrics"].items():
                key = metric if f"{prefix}{metric}" == "eval/accuracy" else f"{prefix}{metric}"
                assert told[evaluation["step"]][key] == pytest.approx(figure["value"], abs=1e-6)
                compared += 1
    assert compared >= 8


@pytest.mark.more
def test_an_evaluation_without_a_score_does_not_end_the_training(start, tmp_path, capsys):
    for name, answer in (("rows", "1"), ("held_out", "unknown")):
        rows = [{"prompt": f"{n}+1=", "answer": answer} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    base, size = tmp_path / "base", {"hidden_size": 32, "layers": 1, "heads": 1}
    make_tiny_model(base, build_character_tokenizer(CHARACTERS), seed=7, context=64, **size)

    def known(response, answer):
        return None if answer == "unknown" else float(response.startswith(answer))

    job = start(
        *("algorithm=grpo", "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"),
        *(f"model.path={base}", "reward.on_error=drop"),
        *(f"data.eval_path={tmp_path / 'held_out.jsonl'}", "eval.every=1", "eval.samples=2"),
        *("trainer.steps=2", "checkpoint.every=1", "checkpoint.best=accuracy"),
        *("eval.stop.metric=accuracy", "eval.stop.patience=5"),
        reward=known,
    )
    assert len(run(job)) == 2
    folder, names = job.directory.path, {"accuracy", "eval/mean@2", "eval/pass@2"}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    told = [row for row in lines if "accuracy" in row]
    assert len(told) == 3 and all(row[name] is None for row in told for name in names)
    entries = json.loads((folder / "evaluations.json").read_text())["evaluations"]
    metrics = [one for entry in entries for one in entry["sets"]["held_out"]["metrics"].values()]
    assert len(metrics) == 9 and all(one["value"] is None for one in metrics)
    said = capsys.readouterr().out
    assert "evaluation at step 0: none of the" in said and "its figures say nothing" in said


def test_a_function_compares_the_samples_of_a_prompt(start):
    def longest(responses):
        return [float(len(text) == max(map(len, responses))) for text in responses]

    job = start("algorithm=ppo", "trainer.steps=1", reward=longest)
    run(job)
    rows = samples(job)
    for first in range(0, 32, 4):
        lengths = [len(text) for text in rows["response"][first : first + 4]]
        assert rows["scores"][first : first + 4] == [float(n == max(lengths)) for n in lengths]

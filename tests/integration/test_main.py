"""The command line, from start to the files it leaves."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
from conftest import Command
from settings import SHORT

from hybridrl.data.tasks.arithmetic import problems

INLINE = ["executor=inline", "rollout=transformers"]


def without_measurements(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    measured = ("time/", "share/", "throughput/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


def finished(folder, *overrides, environment=None):
    """A run that has come to its end."""
    run = Command(folder, *SHORT, *overrides, environment=environment)
    assert run.finish() == 0, run.output
    return run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """With Ray and vLLM."""
    folder = tmp_path_factory.mktemp("whole")
    return finished(folder, "observe.samples_every=1", "metrics=tensorboard")


@pytest.fixture(scope="module")
def inline_run(tmp_path_factory):
    """Where neither Ray nor vLLM can be imported."""
    folder = tmp_path_factory.mktemp("inline")
    for package in ("ray", "vllm"):
        (folder / f"{package}.py").write_text("raise ImportError('hidden by the test')")
    return finished(folder, *INLINE, "warmup.steps=40", environment={"PYTHONPATH": str(folder)})


@pytest.mark.ray
@pytest.mark.vllm
def test_a_run_leaves_everything_a_user_needs(whole_run):
    run = whole_run
    files = {path.name for path in run.directory.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples", "logs", "model", "report.html"} <= files
    summary = json.loads((run.directory / "summary.json").read_text())
    assert {
        "accuracy_first",
        "accuracy_last",
        "reward_first",
        "reward_last",
        "steps",
        "seconds_to_first_step",
        "seconds_train",
        "tokens_generated",
    } <= summary.keys()
    assert summary["steps"] == 2 and summary["tokens_generated"] > 0
    logs = {path.name for path in (run.directory / "logs").iterdir()}
    assert logs == {"actor-0.log", "actor-1.log", "reward-0.log", "reward-1.log"}
    samples = pq.read_table(run.directory / "samples" / "step-000002.parquet")
    assert samples.num_rows == 64
    # 3 supervised steps and one GRPO update came before the second step's samples.
    assert set(samples["policy_version"].to_pylist()) == {4}
    assert str(run.directory) in run.output.strip().splitlines()[-1]
    metrics = without_measurements(run.directory / "metrics.jsonl")
    steps = [row for row in metrics if "policy/loss" in row]
    assert all(row["mismatch/k3"] < 1e-6 and row["response/tokens"] > 0 for row in steps)
    # The figures of a step are those of its own samples.
    mean = sum(samples["scores"].to_pylist()) / samples.num_rows
    assert steps[-1]["reward/mean"] == pytest.approx(mean)


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.vllm
def test_equal_seeds_give_equal_rewards_with_vllm(whole_run, run):
    again = run(*SHORT)
    keys = ("reward/mean", "response/tokens", "accuracy")
    first, second = (
        [[row.get(k) for k in keys] for row in without_measurements(directory / "metrics.jsonl")]
        for directory in (whole_run.directory, again)
    )
    assert first == second


@pytest.mark.ray
@pytest.mark.more
def test_equal_seeds_give_equal_metrics_with_transformers(run, tmp_path):
    first, second = (
        run(*SHORT, "rollout=transformers", f"run.directory={tmp_path / name}")
        for name in ("first", "second")
    )
    metrics = [without_measurements(folder / "metrics.jsonl") for folder in (first, second)]
    assert metrics[0] == metrics[1]


def test_the_saved_model_is_an_ordinary_transformers_model(inline_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = inline_run
    folder = run.directory / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = problems(count_held_out=16, seed=0)[1]
    right = 0
    for problem in held_out:
        ids = torch.tensor([tokenizer(problem["prompt"])["input_ids"]])
        answer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True) == problem["answer"]
    summary = json.loads((run.directory / "summary.json").read_text())
    assert right / 16 == summary["accuracy_last"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.step=3"], ["trainer.step", "Did you mean `trainer.steps`?"]),
        (["data=jsonl", "data.path=missing.jsonl", "model.path=."], ["config.json"]),
        (["actor.tokens_per_microbatch=10"], ["actor.tokens_per_microbatch=10", "14"]),
        (["rollout.max_tokens=500"], ["rollout.max_tokens=500", "the model takes 128"]),
        (["executor=ray", "num_devices=400"], ["num_devices=400", "CPU cores"]),
        (["reward.function=missing.py:score"], ["missing.py"]),
        (["run.root=/proc/nowhere", "run.directory=null"], ["run.root"]),
    ],
)
def test_wrong_settings_are_sentences(refusal, overrides, words):
    said = refusal(*INLINE, *overrides)
    assert all(word in said for word in words), said


def test_the_command_says_what_is_wrong_in_a_sentence(command):
    run = command(*INLINE, "trainer.step=3")
    assert run.finish() == 2
    assert "Did you mean `trainer.steps`?" in run.output and "Traceback" not in run.output


def test_a_model_folder_without_weights(refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    settings = ["data=jsonl", "data.path=prompts.jsonl", "model.path=empty"]
    assert "no weights" in refusal(*INLINE, *settings)


@pytest.mark.more
def test_real_work_reads_files_and_functions_of_the_users(inline_run, command, tmp_path):
    rows = "".join(f'{{"question": "{i}+1=", "solution": "{i + 1}"}}\n' for i in range(40))
    (tmp_path / "prompts.jsonl").write_text(rows)
    (tmp_path / "rewards.py").write_text(
        "async def digits(response, **row):\n    return sum(c.isdigit() for c in response) / 8\n"
        "def right(response, answer):\n    return float(response == answer)\n"
    )
    run = command(
        *SHORT,
        *INLINE,
        "warmup.steps=0",
        f"model.path={inline_run.directory / 'model'}",
        "data=jsonl",
        "data.path=prompts.jsonl",
        "data.prompt_column=question",
        "data.answer_column=solution",
        "rollout.max_tokens=8",
        "reward.function=[rewards.py:digits,rewards.py:right]",
        "reward.weights=[1,0.5]",
        "actor.updates_per_step=2",
        "algorithm.kl_coefficient=0.01",
        "observe.samples_every=1",
    )
    assert run.finish() == 0, run.output
    metrics = without_measurements(run.directory / "metrics.jsonl")
    assert any(row.get("policy/kl", 0) > 0 for row in metrics)
    samples = pq.read_table(run.directory / "samples" / "step-000002.parquet").to_pylist()
    last = next(row for row in metrics if row["step"] == 2 and "reward/mean" in row)
    for name in ("reward/digits", "reward/right"):
        found = [row[name] for row in samples]
        assert last[name] == pytest.approx(sum(found) / len(found))


def test_a_row_without_the_column_is_named(refusal, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "3"}\n')
    (tmp_path / "m").mkdir()
    settings = ["data=jsonl", "data.path=prompts.jsonl", "model.path=m"]
    assert "config.json" in refusal(*INLINE, *settings)

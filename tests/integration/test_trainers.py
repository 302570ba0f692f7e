"""Driver programs: what they may know, and steps of each with tiny real workers in this process."""

import ast
import contextlib
import json
import math
import pkgutil
from pathlib import Path

import pytest
import torch

from hybridrl import trainers
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config
from hybridrl.controller import (
    DP,
    THREE_D_ALL_MICRO_DP,
    BatchRef,
    InlineExecutor,
    Worker,
    WorkerGroup,
    transfer,
)
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.evaluation.held_out_metrics import evaluate_responses
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.rollout import SamplingSettings
from hybridrl.run.step_metrics import compute_step_metrics
from hybridrl.run.step_runner import PendingStep

pytestmark = pytest.mark.usefixtures("process_group")

FORBIDDEN = ("workers", "engine", "models", "parallel", "roles")
DRIVERS = ("grpo", "ppo", "remax", "safe_rlhf")

PROMPTS, SAMPLES, MAX_TOKENS = 4, 4, 3
SMALL = [
    "executor=inline",
    "rollout=transformers",
    "devices=cpu",
    "warmup.steps=0",
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    f"data.prompts_per_step={PROMPTS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    f"rollout.max_tokens={MAX_TOKENS}",
    "eval.prompts=8",
    "actor.optimizer={learning_rate: 1e-2, warmup_steps: 0, schedule: constant}",
]
REWARDS = '''
def one_digit(prompt, response, **row):
    """Differs between the answers of any prompt."""
    return float(response[:1] < "5")

def mostly_alike(prompt, response, **row):
    """Differs between the answers of one prompt in ten."""
    return one_digit(prompt, response) if sum(map(ord, prompt)) % 10 == 0 else 0.5

def half_alike(prompt, response, **row):
    """Differs between the answers of every other prompt."""
    return one_digit(prompt, response) if sum(map(ord, prompt)) % 2 else 0.5

def fingerprint(prompt, response, **row):
    """Differs between any two answers."""
    return float(sum(place * ord(c) for place, c in enumerate(response, 1)))

def works_or_fails(prompt, response, **row):
    """All answers that it can score score alike."""
    if one_digit(prompt, response):
        raise ValueError
    return 1.0

def alike(prompt, response, **row):
    return 1.0

def easy(prompt, response, source, **row):
    return float(source == "easy")
'''


def imports(name):
    """(module, names) of every import in a module of `hybridrl.trainers`."""
    tree = ast.parse((Path(trainers.__file__).parent / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module, [alias.name for alias in node.names]


def test_driver_programs_know_no_engine():
    for module in pkgutil.iter_modules(trainers.__path__):
        for target, names in imports(module.name):
            room = target.removeprefix("hybridrl.").split(".")[0]
            assert not (target.startswith("hybridrl.") and room in FORBIDDEN), (
                f"{module.name}.py imports {target}"
            )
            if target.startswith("hybridrl.rollout"):
                assert target == "hybridrl.rollout", module.name
                assert {*names} <= {"SamplingSettings", "PartialRollout"}, module.name


def test_driver_programs_differ_only_in_their_mathematics():
    known = {}
    for name in DRIVERS:
        targets = {target for target, _ in imports(name) if target.startswith("hybridrl.")}
        own = ("trainers", "algorithms", "config")
        known[name] = {target for target in targets if target.split(".")[1] not in own}
    assert set().union(*known.values()) == {"hybridrl.controller"}, known


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def start(tmp_path, rewards):
    """Starts a job of these settings; gives the job and its driver program."""
    with contextlib.ExitStack() as stack:

        def make(*overrides, reward="one_digit"):
            settings = [*SMALL, f"run.root={tmp_path}", f"reward.function={rewards}:{reward}"]
            job = stack.enter_context(Job(load_config([*settings, *overrides])))
            return job, job.make_trainer()

        yield make


def step(job, trainer):
    """One step: its samples, its updates, its metrics as they are written, and its calls; what
    the trainer says of it is kept as `said`."""
    trainer.said = result = trainer.step()
    updates = [handle.get() for handle in result.updates]
    assert all(math.isfinite(value) for update in updates for value in update.values())
    records = job.executor.take_records()
    drawn = PendingStep(1, 0.0, result, 0, range(0)).drawn()
    metrics = compute_step_metrics(records, updates, 1.0, drawn)
    return result.batch, updates, metrics, [r.method for r in records]


def held_out(job):
    return job.put(job.held_out)


def test_grpo(start):
    job, trainer = start("actor.updates_per_step=2", "algorithm.kl_coefficient=0.1")
    assert set(job.groups) == {"actor", "reward", "reference"}
    batch, updates, metrics, calls = step(job, trainer)
    rows = batch.collect()
    assert len(rows) == PROMPTS * SAMPLES and len(updates) == 2
    assert rows["group_id"].tolist() == [n for n in range(PROMPTS) for _ in range(SAMPLES)]
    assert calls.count("generate_sequences") == 1 and calls.count("loss_weights") == 2
    assert {"log_probs", "ref_log_probs", "advantages"} <= set(rows.columns)
    # The model that answered is the reference still, and samples as it scores.
    torch.testing.assert_close(rows["log_probs"].values, rows["ref_log_probs"].values)
    torch.testing.assert_close(
        rows["log_probs"].values, rows["rollout_log_probs"].values, rtol=1e-4, atol=1e-4
    )
    for row in rows.to_pylist():
        assert len(set(row["advantages"])) == 1 and len(row["advantages"]) <= MAX_TOKENS
    scores = rows["scores"].view(PROMPTS, SAMPLES)
    assert metrics["reward/mean"] == pytest.approx(float(scores.mean()))
    assert metrics["policy/grad_norm"] > 0 and metrics["policy/kl"] > 0
    assert job.groups["actor"].policy_version().get() == [2]
    # The next step samples from what has been learned.
    batch, *_ = step(job, trainer)
    rows = batch.collect(["policy_version", "group_id"])
    assert set(rows["policy_version"].tolist()) == {2}
    assert int(rows["group_id"].min()) == PROMPTS
    again = batch.collect()
    torch.testing.assert_close(
        again["log_probs"].values, again["rollout_log_probs"].values, rtol=1e-4, atol=1e-4
    )


def test_dynamic_sampling_is_bounded_and_says_what_it_found(start):
    job, trainer = start("algorithm=dapo", "algorithm.max_refills=2", reward="mostly_alike")
    assert set(job.groups) == {"actor", "reward"}, "without a KL no reference is needed"
    batch, _, _, calls = step(job, trainer)
    assert "compute_log_prob" not in calls, "the policy that sampled is the one updated"
    figures = trainer.said.metrics
    rows = batch.collect(["scores", "group_id"])
    scores = rows["scores"].view(-1, SAMPLES)
    kept = len(scores)
    assert 0 < kept < PROMPTS, "of 12 prompts only about one has answers that differ"
    assert (scores.min(1).values < scores.max(1).values).all()
    groups = rows["group_id"].view(-1, SAMPLES)
    assert (groups == groups[:, :1]).all()
    assert calls.count("generate_sequences") == 3
    assert figures["dynamic/generations"] == 3.0
    assert figures["dynamic/informative"] == pytest.approx(kept / (3 * PROMPTS))
    assert trainer.said.notices == [
        f"Only {kept} of {3 * PROMPTS} prompts had samples of different scores, after 3 "
        "generations (algorithm.max_refills); the step learns from those."
    ]


def test_dynamic_sampling_stops_at_enough_prompts(start):
    job, trainer = start("algorithm=dapo", "rollout.samples_per_prompt=8", reward="half_alike")
    for _ in range(4):
        batch, _, _, calls = step(job, trainer)
        assert len(batch) == PROMPTS * 8, "what the last generation has too many of is left out"
        assert calls.count("generate_sequences") == trainer.said.metrics["dynamic/generations"] > 1
    assert not trainer.said.notices


def test_a_sample_that_is_dropped_does_not_make_its_prompt_informative(start):
    settings = ["algorithm=dapo", "algorithm.max_refills=0", "reward.on_error=drop"]
    job, trainer = start(*settings, reward="works_or_fails")
    batch, *_ = step(job, trainer)
    dropped = batch.collect(["scores"])["scores"].isnan()
    assert dropped.any() and not dropped.all()
    assert trainer.said.notices[0].startswith(f"Only 0 of {PROMPTS} prompts")


def test_dynamic_sampling_of_prompts_that_teach_nothing(start):
    settings = ["algorithm=dapo", "algorithm.max_refills=1", "actor.updates_per_step=3"]
    job, trainer = start(*settings, reward="alike")
    batch, updates, metrics, calls = step(job, trainer)
    assert calls.count("generate_sequences") == 2 and len(updates) == 3
    assert (batch.collect(["advantages"])["advantages"].values == 0).all()
    assert metrics["policy/grad_norm"] == 0
    assert trainer.said.metrics["dynamic/informative"] == 0
    assert trainer.said.notices[0].startswith(f"Only 0 of {2 * PROMPTS} prompts had samples")


def test_ppo_with_kl_in_the_reward_and_a_target(start):
    job, trainer = start(
        "algorithm=ppo",
        "algorithm.kl_in_reward=true",
        "algorithm.kl_coefficient=0.1",
        "algorithm.kl_target=0.5",
        f"algorithm.kl_horizon={2 * PROMPTS * SAMPLES}",
        "critic.warmup_steps=1",
        "algorithm.ptx_coefficient=0.1",
    )
    assert set(job.groups) == {"actor", "critic", "reward", "reference"}
    batch, _, metrics, calls = step(job, trainer)
    assert calls.count("update_critic") == 1
    assert not {"update_actor", "update_supervised"}.intersection(calls)
    assert (batch.collect(["values"])["values"].values == 0).all(), "a new head says 0"
    assert metrics["critic/loss"] > 0 and "policy/kl" not in metrics
    assert trainer.said.metrics["policy/kl_coefficient"] == 0.1
    batch, _, metrics, calls = step(job, trainer)
    assert calls.count("update_actor") == calls.count("update_supervised") == 1
    assert (batch.collect(["values"])["values"].values != 0).any()
    assert trainer.said.metrics["policy/kl_coefficient"] == 0.1, "nothing was measured before it"
    step(job, trainer)
    # 0.1 (1 + clip(kl / target - 1, -0.2, 0.2) / 2)
    factor = 1 + min(max(metrics["policy/kl"] / 0.5 - 1, -0.2), 0.2) / 2
    assert trainer.said.metrics["policy/kl_coefficient"] == pytest.approx(0.1 * factor)
    assert factor != 1


def test_remax(start):
    job, trainer = start("algorithm=remax", "rollout.samples_per_prompt=3", reward="fingerprint")
    prompts = trainer.next_batch()
    trainer.next_batch = lambda: prompts
    greedy = prompts | job.groups["actor"].generate_sequences(prompts, job.sampling.greedy())
    expected = job.groups["reward"].compute_reward(greedy).collect(["scores"])["scores"]
    job.executor.take_records()
    batch, updates, metrics, calls = step(job, trainer)
    rows = batch.collect()
    assert len(rows) == PROMPTS * 3 and len(updates) == 1
    assert calls.count("generate_sequences") == calls.count("compute_reward") == 2
    assert torch.equal(rows["greedy_scores"], expected.repeat_interleave(3))
    for row in rows.to_pylist():
        gain = row["scores"] - row["greedy_scores"]
        assert row["advantages"] == [gain] * len(row["response_ids"])
    assert metrics["policy/grad_norm"] > 0
    assert metrics["reward/mean"] == pytest.approx(float(rows["scores"].mean()))
    assert metrics["greedy/reward/mean"] == pytest.approx(float(expected.mean()))


def test_safe_rlhf_moves_its_multiplier(start, rewards):
    job, trainer = start(
        "algorithm=safe_rlhf",
        f"cost.function={rewards}:alike",
        "cost.limit=0.25",
        "cost.multiplier=0.5",
        "cost.multiplier_rate=0.4",
    )
    assert set(job.groups) == {"actor", "critic", "cost_critic", "reward", "cost"}
    batch, updates, metrics, _ = step(job, trainer)
    rows = batch.collect()
    assert (rows["costs"] == 1.0).all() and "reward/one_digit" in rows.columns
    assert len(updates) == 3 and metrics["cost/mean"] == 1.0 and metrics["cost_critic/loss"] > 0
    assert trainer.said.metrics["cost/multiplier"] == 0.5
    step(job, trainer)
    # Every sample is over the limit by as much as the others: by one unit of the violations.
    expected = 0.5 * math.exp(0.4 * 0.5)
    assert trainer.said.metrics["cost/multiplier"] == pytest.approx(expected)


def test_sft(start):
    job, trainer = start("algorithm=sft", "actor.updates_per_step=2")
    assert set(job.groups) == {"actor"}
    before = trainer.evaluate(held_out(job))
    batch, updates, metrics, _ = step(job, trainer)
    rows = batch.collect()
    assert len(rows) == PROMPTS and len(updates) == 2
    assert sum(update["tokens"] for update in updates) == len(rows["response_ids"].values)
    assert metrics["policy/loss"] == pytest.approx(math.log(len(job.tokenizer)), rel=0.1)
    for _ in range(4):
        step(job, trainer)
    assert before.keys() == {"eval/loss"}
    assert trainer.evaluate(held_out(job))["eval/loss"] < 0.9 * before["eval/loss"]


def learn_one_batch(job, trainer, steps):
    """Figures of the pairs that were learned, before and after; metrics of the first step."""
    batch = trainer.next_batch()
    trainer.next_batch = lambda: batch
    before = trainer.evaluate(batch)
    metrics = [step(job, trainer)[2] for _ in range(steps)]
    return before, trainer.evaluate(batch), metrics[0]


def test_dpo(start):
    job, trainer = start("algorithm=dpo", "preference.beta=0.5")
    assert set(job.groups) == {"actor", "reference"}
    prompts = [row["prompt_ids"] for row in held_out(job).collect().to_pylist()]
    assert len(prompts) == 16 and prompts[0::2] == prompts[1::2]
    before, after, metrics = learn_one_batch(job, trainer, steps=8)
    # The policy is the reference still.
    assert before == {"eval/pair_accuracy": 0.5, "eval/pair_margin": 0.0}
    assert metrics["policy/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert after["eval/pair_accuracy"] == 1.0 and after["eval/pair_margin"] > 0.5


def test_reward_model(start):
    job, trainer = start("algorithm=reward_model", "actor.optimizer.learning_rate=1e-3")
    assert set(job.groups) == {"reward_model"}
    before, after, metrics = learn_one_batch(job, trainer, steps=14)
    # A new head says 0 of everything.
    assert before == {"eval/pair_accuracy": 0.5, "eval/pair_margin": 0.0}
    assert metrics["policy/loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert after["eval/pair_accuracy"] == 1.0 and after["eval/pair_margin"] > 0.3


def test_evaluate(start, tmp_path):
    model = make_tiny_model(
        tmp_path / "model",
        build_character_tokenizer(CHARACTERS),
        **{"seed": 0, "hidden_size": 32, "layers": 1, "heads": 1, "context": 32},
    )
    rows = [{"prompt": f"{n}+1=", "answer": str(n), "source": "easy"} for n in range(1, 10)]
    rows += [{"prompt": f"{n}+2=", "answer": str(n), "source": "hard"} for n in range(1, 7)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job, trainer = start(
        "algorithm=evaluate",
        *("data=jsonl", f"data.path={data}", f"data.eval_path={data}", "eval.prompts=15"),
        *("model.tiny.context=32", f"model.path={model}", "eval.samples=2"),
        "eval.by_column=source",
        reward="easy",
    )
    assert not trainer.TRAINS and set(job.groups) == {"actor", "reward"}
    figures = trainer.evaluate(held_out(job))
    names = ("accuracy", "eval/mean@2", "eval/pass@2")
    expected = {f"{name}/{source}": x for name in names for source, x in SOURCES.items()}
    assert figures == pytest.approx(dict.fromkeys(names, 9 / 15) | expected)
    with pytest.raises(NotImplementedError, match="takes no steps"):
        trainer.step()


SOURCES = {"easy": 1.0, "hard": 0.0}


class Answerer(Worker):
    """Answers greedily with the row's `greedy`, and otherwise with its three `answers` in turn."""

    @transfer(THREE_D_ALL_MICRO_DP)
    def generate_sequences(self, batch: Batch, sampling: SamplingSettings) -> Batch:
        if sampling.temperature == 0:
            return Batch.from_columns({"found": batch["greedy"]})
        turns = enumerate(batch["answers"].rows())
        return Batch.from_columns({"found": torch.stack([row[turn % 3] for turn, row in turns])})


class Scorer(Worker):
    @transfer(DP)
    def compute_reward(self, batch: Batch) -> Batch:
        return Batch.from_columns({"scores": batch["found"]})


def test_mean_and_pass_at_k():
    config = Config()
    config.eval.samples, config.eval.by_column, config.reward.correct_at = 3, "source", 0.5
    answers = [[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.49, 0.51], [math.nan] * 3]
    batch = Batch.from_columns(
        {"source": [*"abac"], "greedy": [1.0, 0.0, 0.4, math.nan], "answers": answers}
    )
    with InlineExecutor("cpu") as executor:
        actor, reward = (
            WorkerGroup(executor, name, kind, [0]).ready()
            for name, kind in (("actor", Answerer), ("reward", Scorer))
        )
        sampling = SamplingSettings(max_tokens=1, temperature=1.0)
        found, _ = evaluate_responses(actor, reward, executor.put(batch), sampling, config)
    assert found == pytest.approx(
        {
            **{"accuracy": 1 / 4, "accuracy/a": 1 / 2, "accuracy/b": 0.0},
            **{"eval/mean@3": 3 / 12, "eval/mean@3/a": 3 / 6, "eval/mean@3/b": 0.0},
            **{"eval/pass@3": 2 / 4, "eval/pass@3/a": 1.0, "eval/pass@3/b": 0.0},
            # No response could be scored there.
            **dict.fromkeys(("accuracy/c", "eval/mean@3/c", "eval/pass@3/c"), math.nan),
        },
        nan_ok=True,
    )


def test_the_reference_of_remax_waits_for_no_reward(start, monkeypatch):
    """A function on hosts of the actor that reads scores would hold up what they do next."""
    hosts, apply = [], BatchRef.apply

    def noted(self, function, columns, *, on=None, **options):
        hosts.append(on and on.role)
        return apply(self, function, columns, on=on, **options)

    _, trainer = start("algorithm=remax", "algorithm.kl_coefficient=0.1")
    monkeypatch.setattr(BatchRef, "apply", noted)
    for handle in trainer.step().updates:
        handle.get()
    # Of the baseline, before the reference scores, and of the advantages, after it.
    assert hosts[:2] == ["reward", "actor"]

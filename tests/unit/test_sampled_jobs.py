"""Jobs in this process: at which temperature what was sampled is scored, and what was given; what
their noise, and the order of their mini-batches, depend on."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from settings import configured
from transformers import AutoModelForCausalLM

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.job.job import Job
from hybridrl.main import run
from hybridrl.models.model_loading import make_tiny_model

pytestmark = pytest.mark.usefixtures("process_group")
PROMPTS, SAMPLES = 4, 3
HERE = [
    *("executor=inline", "devices=cpu", "rollout=transformers", "warmup.steps=0"),
    "data=arithmetic",
    *(f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
    *("rollout.max_tokens=6", "eval.prompts=8", "actor.optimizer.learning_rate=1e-2"),
    *("actor.optimizer.warmup_steps=0", "actor.optimizer.schedule=constant"),
    *("reward.function=length", "reward.options.length.limit=4", "reward.options.length.ramp=3"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One whose distributions are far from uniform, so that temperatures show."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    shape = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 64}
    make_tiny_model(folder, build_character_tokenizer(CHARACTERS), seed=0, **shape)
    weights = load_file(folder / "model.safetensors")
    scaled = {name: w * 5 if w.ndim == 2 else w for name, w in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def start(model, tmp_path):
    """A job of these settings, and its program."""
    jobs = []

    def start(*overrides):
        folder = [f"model.path={model}", f"run.directory={tmp_path}/run{len(jobs)}"]
        jobs.append(Job(configured([*HERE, *folder, *overrides])))
        job = jobs[-1].__enter__()
        return job, job.make_trainer()

    yield start
    for job in jobs:
        job.__exit__(None, None, None)


def step(trainer):
    """What a step learned from, and the metrics of its updates."""
    batch, updates = trainer.step()
    metrics = [update.get() for update in updates]
    return batch.collect(), metrics


@pytest.mark.more
@pytest.mark.parametrize("lora", [[], ["actor.lora.rank=2"]], ids=["whole", "lora"])
def test_samples_are_scored_and_learned_at_the_temperature_that_they_were_drawn_with(start, lora):
    """What the generator says of its tokens is what all others say of them before the first update:
    the policy, its reference, and the update itself."""
    own = ["actor.updates_per_step=2", "algorithm.kl_coefficient=0.1", *lora]
    _, trainer = start("rollout.temperature=0.5", *own)
    batch, metrics = step(trainer)
    said = batch["rollout_log_probs"].values
    for name in ("log_probs", "ref_log_probs"):
        torch.testing.assert_close(batch[name].values, said, atol=1e-4, rtol=0)
    assert metrics[0]["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics[0]["kl"] < 1e-8 and metrics[0]["mismatch_abs_max"] < 1e-4
    again, _ = step(trainer)
    said = again["rollout_log_probs"].values
    torch.testing.assert_close(again["log_probs"].values, said, atol=1e-4, rtol=0)
    assert (again["ref_log_probs"].values - said).abs().max() > 1e-2


def test_pairs_of_samples_are_scored_at_the_temperature_that_they_were_drawn_with(start):
    _, trainer = start("algorithm=online_dpo", "rollout.temperature=0.5")
    _, metrics = step(trainer)
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_what_is_given_is_scored_and_learned_at_1(start, algorithm):
    found = []
    for temperature in (1.0, 0.5):
        job, trainer = start(f"algorithm={algorithm}", f"rollout.temperature={temperature}")
        before = trainer.evaluate(job.put(job.held_out))
        _, metrics = step(trainer)
        found.append((before, metrics, trainer.evaluate(job.put(job.held_out))))
    assert found[0] == found[1]


def test_mini_batches_are_whole_groups_in_an_order_drawn_for_each_step(start):
    """By the seed of the run: of the same rows another order in another step, or another pass."""
    _, trainer = start("actor.updates_per_step=3", "data.prompts_per_step=7", "run.seed=5")
    orders = []
    for number in range(3):
        if number < 2:
            batch = trainer.samples()
        rows = batch.collect(["group_id"])["group_id"].tolist()
        parts = [part.collect(["group_id", "loss_weights"]) for part in trainer.mini_batches(batch)]
        groups = [part["group_id"].tolist() for part in parts]
        assert sorted(group for part in groups for group in part) == rows
        assert [len(set(part)) for part in groups] == [2, 2, 3]
        for part in groups:
            assert all(part.count(group) == SAMPLES for group in part)
        orders.append([group - rows[0] for part in groups for group in part])
    assert len({tuple(order) for order in orders}) == 3 and sorted(orders[0]) not in orders
    few = batch.take(range(SAMPLES + 1))
    assert [len(part) for part in trainer.mini_batches(few)] == [1, 1, 2], "of samples"


@pytest.mark.more
def test_the_samples_of_a_run_do_not_depend_on_how_often_it_is_evaluated(model, tmp_path):
    found = []
    for every in (0, 1):
        folder = tmp_path / f"every{every}"
        own = [f"model.path={model}", f"run.directory={folder}", f"eval.every={every}"]
        steps = ["trainer.steps=3", "eval.samples=2", "observe.show_every=0"]
        run(configured([*HERE, *own, *steps]))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        named = ("reward/mean", "response/length_mean", "policy/grad_norm", "policy/entropy")
        found.append([[row.get(name) for name in named] for row in lines if named[0] in row])
    assert len(found[0]) == 3 and found[0] == found[1]


def test_the_baseline_of_remax_is_the_score_of_the_likeliest_response(start, model):
    _, trainer = start("algorithm=remax")
    result = trainer.step()
    greedy, batch = result.other_samples["greedy"].collect(), result.batch.collect()
    plain = AutoModelForCausalLM.from_pretrained(model)
    rows = (greedy[f"{name}_ids"].rows() for name in ("prompt", "response"))
    for prompt, response in zip(*rows, strict=True):
        logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == response.tolist()
    gains = batch["scores"] - greedy["scores"].repeat_interleave(SAMPLES)
    firsts = batch["advantages"].cu_seqlens[:-1]
    assert batch["advantages"].values[firsts].tolist() == pytest.approx(gains.tolist(), abs=1e-6)
    assert gains.abs().max() > 0.1


def test_ppo_takes_the_kl_off_rewards_by_a_coefficient_that_follows_it(start):
    """Without a discount the return of a first token is the score less the KL of all."""
    kl = ["algorithm.kl_coefficient=0.5", "algorithm.kl_in_reward=true"]
    adaptive = ["algorithm.kl_target=0.5", "algorithm.kl_horizon=24"]
    plain = ["algorithm.gamma=1", "algorithm.lam=1", "actor.updates_per_step=1"]
    _, trainer = start("algorithm=ppo", *kl, *adaptive, *plain)
    results = []
    for _ in range(2):
        results.append(trainer.step())
        for update in results[-1].updates:
            update.get()
    # The first step has a KL of 0; of what is too little 0.2 count, for 12 of 24 samples.
    coefficients = [result.metrics["policy/kl_coefficient"] for result in results]
    assert coefficients == pytest.approx([0.5, 0.5 * (1 - 0.2 * 12 / 24)])
    batch = results[1].batch.collect()
    bounds = batch["returns"].cu_seqlens
    gaps = batch["log_probs"].values - batch["ref_log_probs"].values
    taken = torch.stack([gap.sum() for gap in gaps.split(bounds.diff().tolist())])
    expected = batch["scores"] - coefficients[1] * taken
    found = batch["returns"].values[bounds[:-1]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert taken.abs().max() > 0.1


def test_dr_grpo_divides_by_the_longest_response_there_might_be(start):
    _, trainer = start("algorithm=dr_grpo")
    samples = trainer.samples()
    lengths = samples.collect(["response_ids"])["response_ids"].lengths
    short = samples.take((lengths < 6).nonzero()[:, 0].numpy())
    assert 1 < len(short) < len(samples)
    (part,) = trainer.mini_batches(short)
    weights = part.collect(["loss_weights"])["loss_weights"].values
    assert weights.tolist() == pytest.approx([1 / (len(short) * 6)] * len(weights))

"""Driver programs over real Ray, vLLM and gloo: what only two ranks and two engines can break."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from settings import SHORT
from transformers import AutoModelForCausalLM

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.models.model_loading import make_tiny_model


@pytest.fixture
def model(tmp_path) -> Path:
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 128}
    return make_tiny_model(
        tmp_path / "tiny", build_character_tokenizer(CHARACTERS), seed=0, **shape
    )


@pytest.mark.long
@pytest.mark.ray
def test_adapters_are_the_same_on_all_ranks_and_in_all_runs_of_one_seed(run, model, tmp_path):
    pytest.importorskip("peft")
    settings = [*SHORT, "rollout=transformers", "warmup.steps=0", f"model.path={model}"]
    settings += ["actor.lora={rank: 2, alpha: 4}", "actor.parallel.shards=1", "num_devices=2"]
    one, other = (run(*settings, f"run.directory={tmp_path / name}") for name in ("one", "other"))
    found, expected = (load_file(f / "model" / "adapter_model.safetensors") for f in (one, other))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize(
    "generator",
    [
        pytest.param(["rollout=vllm"], marks=pytest.mark.vllm),
        ["rollout=transformers", "placement=separation", "num_devices=2"],
    ],
    ids=["vLLM", "on a device of its own"],
)
def test_samples_come_from_a_base_in_4_bits(run, model, generator):
    """Also before the first update, when the folder has another model than the trainer's."""
    pytest.importorskip("peft")
    whole = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():  # far enough from uniform for rounding to be seen
        for parameter in whole.parameters():
            parameter *= 4 if parameter.ndim > 1 else 1
    whole.save_pretrained(model)
    directory = run(
        *(*generator, *SHORT, f"model.path={model}", "warmup.steps=0", "trainer.steps=2"),
        *("actor.lora={rank: 4, base_format: nf4}", "actor.optimizer.learning_rate=1e-2"),
        *("actor.optimizer.warmup_steps=0", "algorithm.kl_coefficient=0.01"),
        *("reward.function=length", "reward.options.length.limit=4"),
        "reward.options.length.ramp=3",
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    assert len(steps) == 2 and all(row["mismatch/k3"] < 1e-6 for row in steps)
    assert steps[-1]["policy/kl"] > 1e-5, "the adapters learned nothing"


@pytest.mark.ray
@pytest.mark.vllm
def test_ppo_with_adapters_samples_from_what_it_has_learned(run, model):
    directory = run(
        *(*SHORT, "algorithm=ppo", f"model.path={model}", "warmup.steps=0", "trainer.steps=3"),
        *("actor.lora.rank=4", "actor.optimizer.learning_rate=1e-3"),
        *("actor.optimizer.warmup_steps=0", "actor.updates_per_step=2"),
        *("algorithm.kl_coefficient=0.01", "algorithm.kl_in_reward=true"),
        # Right answers of an untrained model are rare; lengths differ from sample to sample.
        *("reward.function=length", "reward.options.length.limit=4"),
        "reward.options.length.ramp=3",
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    assert steps[0]["policy/kl"] == pytest.approx(0.0, abs=1e-3)
    assert steps[-1]["policy/kl"] > 1e-4, "the adapters learned nothing"
    # vLLM has the adapters multiplied in: after updates it still samples as the trainer scores.
    assert all(row["mismatch/k3"] < 1e-6 for row in steps)
    assert {"critic/loss", "critic/explained_variance", "policy/kl_coefficient"} <= steps[0].keys()
    adapters = load_file(directory / "model" / "adapter_model.safetensors")
    assert adapters and all("lora_" in name for name in adapters)
    assert (directory / "critic" / "adapter_config.json").is_file()


@pytest.fixture
def adapted(run, model, tmp_path):
    """The folder of a supervised run with adapters."""
    return run(
        *(*SHORT, "algorithm=sft", f"model.path={model}", "actor.lora.rank=4"),
        *("actor.optimizer.learning_rate=1e-2", f"run.directory={tmp_path / 'supervised'}"),
    )


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize("adapters", ["merged", "separate"])
def test_adapters_go_on_from_stage_to_stage(run, model, adapted, adapters):
    directory = run(
        *(*SHORT, "num_devices=2", f"model.path={adapted}", f"rollout.adapters={adapters}"),
        *("algorithm.kl_coefficient=0.01", "warmup.steps=0", "trainer.steps=3"),
        *("actor.optimizer.learning_rate=1e-2", "actor.optimizer.warmup_steps=0"),
        *("reward.function=length", "reward.options.length.limit=4"),
        "reward.options.length.ramp=3",
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    # The reference has the adapters of the first stage, and so has vLLM before the first update.
    assert abs(steps[0]["policy/kl"]) < 1e-6 < 1e-4 < steps[-1]["policy/kl"]
    assert all(row["mismatch/k3"] < 1e-6 for row in steps)
    described = json.loads((directory / "model" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"]) == (str(model), 4)
    first, last = (
        load_file(d / "model" / "adapter_model.safetensors") for d in (adapted, directory)
    )
    assert first.keys() == last.keys() and any(not first[k].equal(last[k]) for k in first)


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.vllm
def test_a_trained_reward_model_rewards_and_is_not_changed(run, model, tmp_path):
    trained = run(
        *("algorithm=reward_model", f"model.path={model}", "trainer.steps=3", "eval.prompts=16"),
        *("data.prompts_per_step=7", f"run.directory={tmp_path / 'rewarding'}"),
    )
    folder = trained / "model"
    before = load_file(folder / "model.safetensors")
    assert "score.weight" in before
    directory = run(
        *(*SHORT, f"model.path={model}", "warmup.steps=0", "reward.function=[]"),
        *(f"reward.model={folder}", "observe.samples_every=1"),
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/std"] for row in rows if "reward/std" in row]
    assert len(rewards) == 2 and all(reward > 0 for reward in rewards)


MINE = """
from functools import partial
from hybridrl.algorithms import TokenLoss
from hybridrl.batch.batch import Batch
from hybridrl.trainers.trainer import UPDATE_COLUMNS, Trainer
from hybridrl.trainers.update_columns import loss_weights

HALF = 0.5

def plain(log_probs, advantages, scale: float = 1.0):
    return TokenLoss(-advantages * log_probs * scale, {"mine/scale": 0 * log_probs + scale})

def half(batch):
    ones = batch.ragged("response_mask")
    halves = ones._replace(values=ones.values * HALF)
    return Batch.from_columns({"advantages": halves})

class Mine(Trainer):
    @staticmethod
    def roles(config):
        return ["actor", "reward"]

    def step(self):
        batch = self.next_batch()
        batch |= self.groups["actor"].generate_sequences(batch, self.sampling)
        batch |= self.groups["reward"].compute_reward(batch)
        learned = batch | batch.apply(half, ["response_mask"])
        learned |= learned.apply(partial(loss_weights, mode="token-mean"), ["response_mask"])
        columns = learned.select(*UPDATE_COLUMNS, "rollout_log_probs", "advantages")
        return batch, [self.groups["actor"].update_actor(columns)]
"""


@pytest.mark.more
@pytest.mark.ray
def test_an_algorithm_in_a_file_beside_the_user(command, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    run = command(
        *(*SHORT, "rollout=transformers", "trainer.name=mine.py:Mine", "warmup.steps=0"),
        *("algorithm.policy_loss=mine.py:plain", "algorithm.loss_options={scale: 3}"),
        "observe.samples_every=1",
    )
    assert run.finish() == 0, run.output
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    assert [row["mine/scale"] for row in steps] == [3.0, 3.0]
    # The loss is 3 * 0.5 * the mean of -log_prob, which is what sampling measured.
    assert steps[0]["policy/loss"] == pytest.approx(1.5 * steps[0]["policy/entropy"], rel=0.2)
    # The samples of a program without advantages are kept without them.
    columns = pq.read_table(run.directory / "samples" / "step-000001.parquet").column_names
    assert "scores" in columns and "advantages" not in columns

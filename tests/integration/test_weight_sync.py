"""After training steps and a sync, vLLM's greedy tokens are transformers' greedy tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.algorithms import PolicyObjective, token_weights
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import (
    ActorConfig,
    LoraAdapterConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutParallelConfig,
)
from hybridrl.controller import WorkerGroup
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.placement.disaggregated_actor import DisaggregatedActor
from hybridrl.rollout import SamplingSettings
from hybridrl.system.shared_memory import remove_shared_memory

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
CASES = [
    # How training is cut, and how many ranks share a copy while generating.
    ("Qwen2", True, ParallelConfig(), 1),
    ("Llama", False, ParallelConfig(), 2),
    ("Qwen3", False, ParallelConfig(pp=2), 1),
    ("Qwen2", True, ParallelConfig(tp=2, pp=2), 2),
]
MORE = [
    ("Llama", True, ParallelConfig(), 1),
    ("Qwen3", True, ParallelConfig(), 2),
    ("Qwen2", True, ParallelConfig(tp=2), 1),
    ("Llama", False, ParallelConfig(tp=2), 2),
    ("Qwen3", True, ParallelConfig(ring=2), 1),
]
JOB = "hybridrl-0-0"
PROMPTS = [[5, 6, 14, 7, 8, 17], [9, 10], [11, 12, 13, 20]]


def make_model(folder: Path, architecture: str, tied: bool) -> None:
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=49,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    getattr(transformers, f"{architecture}ForCausalLM")(config).save_pretrained(folder)
    build_character_tokenizer().save_pretrained(folder)


def supervised_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 49, (6,), generator=generator) for _ in range(12)]
    batch = Batch.from_columns({"prompt_ids": rows, "response_ids": rows})
    ones = batch["response_ids"]._replace(values=torch.ones(72, dtype=torch.uint8))
    weights = token_weights(torch.ones(12, 6, dtype=torch.bool), "token-mean").flatten()
    return batch.with_columns(
        {"response_mask": ones, "loss_weights": ones._replace(values=weights)}
    )


def train_and_sync(executor, folder, architecture, tied, parallel, rollout_tp):
    """Samples before and after three updates, and the bytes that each rank received in the sync;
    the trained model is in the folder."""
    from hybridrl.workers.actor_worker import ActorWorker
    from hybridrl.workers.training_engines import ModelSource

    path = str(folder / "model")
    make_model(folder / "model", architecture, tied)
    rollout = RolloutConfig(
        parallel=RolloutParallelConfig(rollout_tp), kv_cache_gib=0.05, verify_weights=True
    )
    actor = WorkerGroup(
        executor,
        "actor",
        ActorWorker,
        list(range(ranks_of(parallel))),
        source=ModelSource(path, path, "float32", 64, (1,)),
        config=ActorConfig(optimizer=OptimizerConfig(learning_rate=1e-2), parallel=parallel),
        rollout=rollout,
        objective=PolicyObjective(),
        updates=3,
        temperature=1.0,
        job=JOB,
    )
    prompts = Batch.from_columns({"prompt_ids": PROMPTS * 2})
    greedy = SamplingSettings(max_tokens=12, temperature=0.0)
    before = actor.generate_sequences(prompts, greedy).collect(["response_ids"])
    for _ in range(3):
        actor.update_supervised(supervised_batch()).get()
    executor.take_records()
    after = actor.generate_sequences(prompts, greedy).collect()
    received = [record.metrics.get("sync_received", 0) for record in executor.take_records()]
    actor.save_model(str(folder / "trained")).get()
    return before, after, received


def ranks_of(parallel):
    return max(2, parallel.tp * parallel.pp)


def title(case):
    architecture, _, parallel, rollout_tp = case
    cuts = f"tp{parallel.tp} pp{parallel.pp} ring{parallel.ring}"
    return f"{architecture} {cuts} rollout_tp{rollout_tp}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES[0], id=title(CASES[0])),
        *(pytest.param(case, id=title(case), marks=pytest.mark.more) for case in CASES[1:]),
        *(pytest.param(case, id=title(case), marks=pytest.mark.long) for case in MORE),
    ],
)
def test_greedy_tokens_agree_after_training(case, hosts, tmp_path):
    from transformers import AutoModelForCausalLM

    *_, parallel, rollout_tp = case
    with hosts.lend(ranks_of(parallel)) as executor:
        before, after, received = train_and_sync(executor, tmp_path, *case)
    remove_shared_memory(JOB)
    assert set(after["policy_version"].tolist()) == {3}
    expected = []
    for samples, folder in ((before, "model"), (after, "trained")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        expected.append([])
        for prompt in PROMPTS * 2:
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
            tokens = ids[0, len(prompt) :].tolist()
            expected[-1].append(tokens[: tokens.index(1) + 1] if 1 in tokens else tokens)
        assert [row.tolist() for row in samples["response_ids"].rows()] == expected[-1]
    assert expected[0] != expected[1]
    # Of each copy of the model its ranks lack what they have not trained, and no byte more.
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    copies = ranks_of(parallel) // rollout_tp
    if copies > 1:
        assert sum(received) == pytest.approx((copies - 1) * whole, rel=0.05)
    else:
        assert sum(received) < 0.5 * whole


def actors_with_adapters(executor, path):
    """Three that learn alike: adapters multiplied into the weights, beside them, and beside them on
    another device."""
    from hybridrl.workers.actor_worker import ActorWorker
    from hybridrl.workers.generator_worker import GeneratorWorker
    from hybridrl.workers.training_engines import ModelSource

    lora = LoraAdapterConfig(rank=4, targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    merged = ModelSource(path, path, "float32", 64, (1,))
    beside = replace(merged, adapters=lora)
    rollout = RolloutConfig(kv_cache_gib=0.05)

    def actor(name, device, source, generates=True):
        return WorkerGroup(
            executor,
            name,
            ActorWorker,
            [device],
            source=source,
            config=ActorConfig(optimizer=OptimizerConfig(learning_rate=3e-2), lora=lora),
            rollout=rollout,
            objective=PolicyObjective(),
            updates=9,
            temperature=1.0,
            job=JOB,
            generates=generates,
        )

    generator = WorkerGroup(
        executor, "generator", GeneratorWorker, [1], source=beside, rollout=rollout, seed=0, job=JOB
    )
    trainer = actor("trainer", 0, beside, generates=False)
    return [
        actor("merged", 1, merged),
        actor("beside", 0, beside),
        DisaggregatedActor(
            trainer, generator, staleness=0, in_flight=False, store=False, weight_sync="auto"
        ),
    ]


@pytest.mark.more
def test_adapters_beside_the_weights_are_those_multiplied_in(hosts, tmp_path):
    make_model(tmp_path, "Llama", tied=False)
    prompts = Batch.from_columns({"prompt_ids": PROMPTS * 4})
    tokens = []
    with hosts.lend(2) as executor:
        actors = actors_with_adapters(executor, str(tmp_path))
        batch = executor.put(prompts)
        for _ in range(3):
            found = []
            for actor in actors:
                samples = batch | actor.generate_sequences(batch, SamplingSettings(max_tokens=12))
                samples |= actor.compute_log_prob(samples)
                found.append(samples.collect(["response_ids", "rollout_log_probs", "log_probs"]))
                actor.update_supervised(supervised_batch()).get()
            for each in found:
                assert each["response_ids"].values.equal(found[0]["response_ids"].values)
                for name in ("rollout_log_probs", "log_probs"):
                    expected = found[0]["log_probs"].values.numpy()
                    assert each[name].values.numpy() == pytest.approx(expected, abs=1e-4)
            tokens.append(found[0]["response_ids"].values.tolist())
    remove_shared_memory(JOB)
    assert tokens[0] != tokens[1] != tokens[2]

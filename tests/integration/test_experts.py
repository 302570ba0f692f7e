"""A mixture of experts with vLLM: a whole job, and a trainer that follows the experts of vLLM."""

from __future__ import annotations

import json
import os

import pytest
import torch
from ranks import run_ranks
from settings import LEARNS, SHORT
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.expert_routing import ExpertRouters, find_routers
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.rollout.rollout_engine import EngineSetup, Request, SamplingSettings
from hybridrl.rollout.sample_generator import GenerationTask, ReplicaShare, SingleTurnStream
from hybridrl.system.shared_memory import remove_shared_memory

pytestmark = [pytest.mark.more, pytest.mark.vllm]
CPU = torch.device("cpu")
SAMPLING = SamplingSettings(max_tokens=24, temperature=1.0)


def make_model(layers=3, dense=(1,)):
    """Layers of experts, but for those that are dense."""
    config = Qwen3MoeConfig(
        vocab_size=49,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=list(dense),
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)


def rank_program(rank, folder, job):
    """Samples of engines of both precisions, made in both ways."""
    from hybridrl.rollout.vllm_engine import VLLMEngine

    found = {}
    prompts = [[5, 6, 14, 7, 8, 17], [9, 10], [9, 10], [11, 12, 13, 20]] * 8
    for dtype in ("float32", "bfloat16"):
        rollout = VLLMEngine(
            EngineSetup(
                str(folder / "model"),
                str(folder / "model"),
                dtype,
                context_length=64,
                eos_token_ids=[1],
                device=CPU,
                seed=0,
                job=job,
            ),
            RolloutConfig(kv_cache_gib=0.01, routing_replay=True, max_sequences=16),
        )
        batch = Batch.from_columns({"prompt_ids": prompts})
        samples = rollout.generate(batch, SAMPLING, seed=0)
        found[dtype] = batch.with_columns(
            {name: samples[name] for name in ("response_ids", "rollout_log_probs", ROUTED_EXPERTS)}
        )
        if dtype == "float32":
            greedy = rollout.generate(
                batch, SamplingSettings(max_tokens=5, temperature=0.0), seed=0
            )
            found["greedy"] = batch.with_columns(
                {name: greedy[name] for name in ("response_ids", ROUTED_EXPERTS)}
            )
            rollout.start(Request(0, prompts[0], SAMPLING, 0, 2))
            rollout.poll()
            rollout.cancel()
            share = ReplicaShare(0, 1, lambda: 10_000)
            task = GenerationTask(batch.take(range(4)), SAMPLING, range(4), 0, share)
            stream = SingleTurnStream(rollout, task)
            streamed, rows = stream.next_samples(4)
            of_rows = batch.take(rows)
            found["streamed"] = of_rows.with_columns(
                {name: streamed[name] for name in ("response_ids", ROUTED_EXPERTS)}
            )
            none, _ = stream.next_samples(1)
            found["none"] = none
        rollout.close()
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    make_model().save_pretrained(folder / "model")
    job = f"hybridrl-{os.getpid()}-replay"
    (found,) = run_ranks(rank_program, folder, 1, folder, job)
    remove_shared_memory(job)
    return found


def scored(batch, replay):
    """Log-probabilities of the responses, and what the routers chose for each token."""
    model = make_model()
    policy, chosen = CausalPolicy(model), []
    ExpertRouters.of(model)
    for router in find_routers(model).values():
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    batch = batch if replay else batch.select(["prompt_ids", "response_ids"])
    with torch.no_grad():
        log_probs = policy(PackedSamples.of(batch, CPU))["log_probs"]
    return log_probs, torch.stack(chosen, dim=1)


@pytest.mark.parametrize("way", ["float32", "greedy", "streamed"])
def test_recorded_are_the_experts_that_the_model_chooses(samples, way):
    batch = samples[way]
    _, own = scored(batch, replay=False)
    lengths = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    of_samples = own.sort(-1).values.split(lengths.tolist())
    for wanted, row in zip(of_samples, batch[ROUTED_EXPERTS].rows(), strict=True):
        assert row.dtype == torch.uint8
        assert torch.equal(row.view(-1, 2, 4).long().sort(-1).values, wanted[:-1])


def test_a_table_without_rows_has_the_column_too(samples):
    assert not len(samples["none"])
    assert samples["none"][ROUTED_EXPERTS].values.dtype == torch.uint8


def test_replay_brings_a_rounded_generator_closer(samples):
    """Trained in float32, generated in bfloat16."""
    batch = samples["bfloat16"]
    said, gap = batch["rollout_log_probs"].values, {}
    for replay in (False, True):
        ratio = scored(batch, replay)[0] - said
        gap[replay] = float((ratio.exp() - 1 - ratio).mean())
    assert 0 < gap[True] < gap[False] / 2


@pytest.mark.ray
def test_a_job_scores_its_samples_by_the_experts_that_generated_them(run, tmp_path):
    """In bfloat16: the same first samples, scored by other experts here and there without it."""
    make_model(layers=4, dense=()).save_pretrained(tmp_path / "model")
    build_character_tokenizer("0123456789+=").save_pretrained(tmp_path / "model")
    steps = {}
    for replay in ("true", "false"):
        folder = run(
            *("trainer.steps=2", "eval.prompts=8", "data.prompts_per_step=8", "warmup.steps=0"),
            *("data=arithmetic", f"model.path={tmp_path}/model", "model.dtype=bfloat16"),
            *("actor.updates_per_step=2", "eval.every=0", "rollout.max_tokens=24"),
            *(f"rollout.routing_replay={replay}", f"run.directory={tmp_path}/{replay}"),
        )
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps[replay] = [row for row in map(json.loads, lines) if "mismatch/k3" in row]
    same = [steps[replay][0]["response/length_mean"] for replay in steps]
    assert same[0] == same[1]
    gap = {replay: sum(row["mismatch/k3"] for row in rows) for replay, rows in steps.items()}
    assert 0 < gap["true"] < gap["false"] / 3, gap


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("replay", ["true", "false"])
def test_a_job_learns_and_its_generator_agrees(run, replay):
    """Trained cut in two, generated whole on each of two devices."""
    folder = run(
        *(*SHORT, *LEARNS, "trainer.steps=8", "model.tiny.experts=8", "actor.parallel.tp=2"),
        *("rollout.verify_weights=true", f"rollout.routing_replay={replay}"),
        # At 1e-2 the policy prefers an empty answer so soon that its routers have preferences, too.
        *("actor.router_loss_weight=0.01", "actor.optimizer.learning_rate=5e-3"),
    )
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    assert all(row["mismatch/k3"] < 1e-9 for row in steps)
    assert all(row["sync/received_bytes"] > 0 for row in steps[1:])  # as boxes
    assert all(0.9 < row["router/loss"] < 4 and 0.5 < row["router/entropy"] <= 1 for row in steps)

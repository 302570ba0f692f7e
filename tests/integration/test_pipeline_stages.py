"""Cutting a model into stages: the parts together are the model, under its own names."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import few_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import LoraAdapterConfig
from hybridrl.errors import ConfigError
from hybridrl.models.lora import add_adapters
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel.pipeline_schedule import check_stages, split_layers
from hybridrl.parallel.staged_model import StagedModel

LAYERS = 5
SHAPE = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
KINDS = [Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig]
PIPELINES = [(2, 1), (2, 2), (4, 1), (5, 1)]


def make_policy(kind=Qwen2Config, tied=True):
    config = kind(**SHAPE, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CausalPolicy(
            AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
        )


def make_samples():
    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11, 12], [13]]
    tensors = {"prompt_ids": prompts, "response_ids": responses}
    batch = Batch.from_columns({n: [torch.tensor(r) for r in v] for n, v in tensors.items()})
    return PackedSamples.of(batch, torch.device("cpu"))


def pass_through(parts, samples, chunks, **options):
    """Hands states from stage to stage in one process."""
    states = None
    for stage in range(len(parts) * chunks):
        states = parts[stage % len(parts)](samples, stage=stage, states=states, **options)
    return states


@given(st.integers(1, 80), st.integers(1, 80))
def test_layers_are_split_evenly_in_order(layers, stages):
    stages = min(layers, stages)
    split = split_layers(layers, stages)
    assert [number for part in split for number in part] == list(range(layers))
    sizes = [len(part) for part in split]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes) and sizes[-1] == min(sizes)


def test_more_stages_than_layers_is_a_sentence():
    check_stages(4, 4)
    check_stages(4, 2, 2)
    with pytest.raises(ConfigError, match=r"parallel.pp=8 .* only 4 layers.*parallel.pp=4 or less"):
        check_stages(4, 8)
    with pytest.raises(ConfigError, match=r"actor.parallel.pp=4 .* 8 stages, 2 on each rank"):
        check_stages(5, 4, 2, "actor.parallel.pp")
    with pytest.raises(ConfigError, match="only 5 layers"):
        StagedModel(make_policy(), torch.float32, 0, 6)


@pytest.mark.parametrize("ranks, chunks", few_of(PIPELINES[:3], 2, several=True))
@pytest.mark.parametrize("kind", few_of(KINDS, 2))
@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_a_row_are_the_model(kind, tied, ranks, chunks):
    samples, whole = make_samples(), make_policy(kind, tied)
    parts = [
        StagedModel(make_policy(kind, tied), torch.float32, rank, ranks, chunks)
        for rank in range(ranks)
    ]
    wanted = whole(samples, temperature=0.7)
    found = pass_through(parts, samples, chunks, temperature=0.7)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5)
    sum(values.sum() for values in wanted.values()).backward()
    sum(values.sum() for values in found.values()).backward()
    gradients = {}
    for part in parts:
        for name, parameter in part.inner.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    for name, parameter in whole.inner.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks, chunks", PIPELINES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_lies_on_one_rank_under_its_own_name(tied, ranks, chunks):
    whole = dict(make_policy(tied=tied).inner.named_parameters())
    parts = [
        StagedModel(make_policy(tied=tied), torch.float32, rank, ranks, chunks)
        for rank in range(ranks)
    ]
    seen = []
    for rank, part in enumerate(parts):
        names = [name for name, _ in part.inner.named_parameters()]
        seen += [name for name in names if (name, rank) != (part.tied, ranks - 1)]
        assert names == [name for name in whole if name in names]
        assert len(list(part.parameters())) == len(names)
        for name, parameter in part.inner.named_parameters():
            assert torch.equal(parameter, whole[name])
    assert sorted(seen) == sorted(whole)


def test_parameters_of_other_stages_are_freed():
    policy = make_policy(tied=False)
    alive = {name: weakref.ref(p) for name, p in policy.inner.named_parameters()}
    part = StagedModel(policy, torch.float32, 1, 3)
    del policy
    gc.collect()
    kept = {name for name, reference in alive.items() if reference() is not None}
    assert kept == {name for name, _ in part.inner.named_parameters()}
    assert kept and all(name.startswith(("model.layers.2.", "model.layers.3.")) for name in kept)


def test_a_scalar_head_lies_in_the_last_stage():
    config = Qwen2Config(**SHAPE, num_labels=1)

    def make():
        torch.manual_seed(0)
        inner = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=PACKED_ATTENTION
        )
        return ScalarModel(inner, "before")

    samples = make_samples()
    parts = [StagedModel(make(), torch.float32, rank, 2, 2) for rank in range(2)]
    found = pass_through(parts, samples, 2)["values"]
    torch.testing.assert_close(found, make()(samples)["values"], rtol=1e-5, atol=1e-5)
    assert parts[0].tied is None
    assert "score.weight" not in dict(parts[0].inner.named_parameters())


def test_a_model_of_other_parts_is_refused_in_a_sentence():
    inner = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_head=2, n_embd=8))
    with pytest.raises(ConfigError, match=r"cannot cut a GPT2Model: it has no `embed_tokens`"):
        StagedModel(CausalPolicy(inner), torch.float32, 0, 2)


def test_adapters_are_refused_in_a_sentence():
    policy = make_policy()
    add_adapters(policy.inner, LoraAdapterConfig(rank=2))
    with pytest.raises(ConfigError, match=r"actor.lora.rank does not go with pipelines"):
        StagedModel(policy, torch.float32, 0, 2)

"""Stages of a decoder: which models can be divided, by trial; their caches."""

import pytest
import torch
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybridrl.errors import ConfigError
from hybridrl.systems.unequal_generation.decoder_stage import check_decoder_stages
from hybridrl.systems.unequal_generation.growing_cache import GrowingCache, left_padded_positions

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Qwen3Config(**SHAPE, head_dim=16),
        MistralConfig(**SHAPE, sliding_window=8),
        Qwen2Config(**SHAPE, **WINDOW),
    ],
    ids=lambda config: config.model_type,
)
def test_plain_decoders_are_divided(config):
    check_decoder_stages(config, "rollout=pipeline", "x")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (GraniteConfig(**SHAPE, embedding_multiplier=3.0), "logits of a small copy are off"),
        (CohereConfig(**SHAPE), "logits of a small copy are off"),
        (Gemma2Config(**SHAPE, head_dim=16), "logits of a small copy are off"),
        (MixtralConfig(**SHAPE, num_local_experts=4), "weights that no linear layer holds"),
        (DeepseekV3Config(**SHAPE), "latent attention"),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100), "no linear layer holds"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_others_are_refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        check_decoder_stages(config, "rollout=pipeline", "x")
    assert str(refused.value).startswith("rollout=pipeline")
    assert "Set rollout=vllm." in str(refused.value)


def test_a_cache_grows_and_keeps_what_it_had():
    cache, expected = GrowingCache(1, 5), None
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randn(5, 2, 7, 4, generator=draw)
    for start, stop in ((0, 2), (2, 5)):
        cache.begin(start, stop)
        assert cache.get_seq_length() == 0
        keys, _ = cache.update(prompts[start:stop], prompts[start:stop], 0)
        assert torch.equal(keys, prompts[start:stop])
    cache.whole()
    expected = prompts
    for token in range(200):
        new = torch.randn(len(expected), 2, 1, 4, generator=draw)
        expected = torch.cat([expected, new], dim=2)
        keys, values = cache.update(new, -new, 0)
        assert torch.equal(keys, expected)
        assert torch.equal(values[:, :, 7:], -expected[:, :, 7:])
        if token == 100:
            rows = torch.tensor([4, 1])
            cache.keep(rows)
            expected = expected[rows]
    assert cache.get_seq_length() == 207
    assert cache.layers[0].get_mask_sizes(1) == (208, 0)


def test_prompts_are_filled_up_on_the_left():
    mask, positions = left_padded_positions([2, 4], torch.device("cpu"))
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert left_padded_positions([3, 3], torch.device("cpu"))[0] is None

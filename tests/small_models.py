"""Random models on which a step takes milliseconds, the same in every process."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.models.packed_attention import PACKED_ATTENTION

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def build_seeded(
    kind: Any, config: PretrainedConfig, attention: str = PACKED_ATTENTION
) -> PreTrainedModel:
    """Build a model by an auto class; its weights are the same whatever its attention."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    return model

"""Whether a model's layers are made of linear layers, which kernels of 8 bits can take the place
of, or multiply with other weights, too: experts, convolutions, recurrences."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.shrunk_config import shrunk

LATENT = "kv_lora_rank"
"""What configurations have whose attention keeps latent states, and multiplies its linear layers'
weights with each other before it begins (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""


def check_linear(
    config: PretrainedConfig,
    setting: str,
    path: str,
    cure: str = "Set rollout.quantization=none.",
) -> None:
    """Refuses a setting that needs plain linear layers, for a model that has others.

    Args:
        cure: What to do then.

    Raises:
        ConfigError: names the setting and what the model has.
    """
    if getattr(config.get_text_config(), LATENT, None):
        found = "latent attention, which multiplies weights with each other"
    else:
        with torch.device("meta"):
            model = build_language_model(shrunk(config))
        found = next(map(_kind, filter(_is_odd, decoder_of(model).modules())), "")
    if found:
        raise ConfigError(
            f"{setting} is for models of attention and linear layers, and {path} "
            f"({config.model_type}) has {found}. {cure}"
        )


def _is_odd(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Linear | nn.Embedding)
    return not plain and any(own.ndim > 1 for own in module.parameters(recurse=False))


def _kind(module: nn.Module) -> str:
    return f"weights that no linear layer holds (in {type(module).__name__})"

"""Models that are planned by their description: known sizes, by name, without their weights."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig

from hybridrl.config.schema import Config

# Llama 2 (arXiv:2307.09288) and, of 13B and 34B, the same family.
_LLAMA = {
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "34b": (8192, 22016, 48, 64, 8),
    "70b": (8192, 28672, 80, 64, 8),
}
"""Hidden size, width of the MLP, layers, heads, key-value heads."""
NAMED_MODELS = (*_LLAMA, *(f"llama-{size}" for size in _LLAMA))


@contextmanager
def materialize_named_models(
    config: Config, tiny: PretrainedConfig | None = None
) -> Iterator[Config]:
    """Yield the configuration with a temporary model folder in place of each name in
    `NAMED_MODELS`, and of the tiny model.

    Args:
        tiny: What `model.path=null` stands for.
    """
    config = copy.deepcopy(config)
    with tempfile.TemporaryDirectory(prefix="hybridrl-plan-") as folder:

        def folder_of(path: str | None) -> str | None:
            if path is None or path.lower() not in NAMED_MODELS:
                return path
            return _write(_llama(path.lower().removeprefix("llama-")), Path(folder) / path)

        if config.model.path is None and tiny is not None:
            config.model.path = _write(tiny, Path(folder) / "tiny")
        config.model.path = folder_of(config.model.path)
        for settings in config.models.values():
            if isinstance(settings, dict) and isinstance(settings.get("path"), str):
                settings["path"] = folder_of(settings["path"])
        for scoring in (config.reward, config.cost):
            if scoring is not None:
                scoring.model = folder_of(scoring.model)
                scoring.judge.path = folder_of(scoring.judge.path)
        yield config


def _llama(size: str) -> LlamaConfig:
    hidden, width, layers, heads, key_value_heads = _LLAMA[size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def _write(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)

"""What can be wrong with how models are cut over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.config.schema import Config, ParallelConfig
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_parallel(config: Config, devices: int) -> None:
    """Refuses cuts that do not fit the devices, the model, or each other.

    Raises:
        ConfigError: naming the setting and what would fit.
    """
    from hybridrl.core.training_mesh import check_sizes

    parallel, rollout_tp = config.actor.parallel, config.rollout.parallel.tp
    check_sizes(devices, parallel, rollout_tp)
    if config.actor.lora.rank and (parallel.tp > 1 or parallel.pp > 1):
        raise ConfigError(
            f"actor.lora.rank={config.actor.lora.rank}: adapters are not cut over devices. Set "
            "actor.parallel.tp=1 and actor.parallel.pp=1, or actor.lora.rank=null."
        )
    if _is_cut(parallel):
        from hybridrl.models import load_config

        path = config.model.path
        model = load_config(path) if path else _tiny(config)
        check_model_fits(parallel, model, path or "the tiny model")


def check_model_fits(parallel: ParallelConfig, model: PretrainedConfig, path: str) -> None:
    """Refuses cuts that the model's heads or layers do not allow."""
    from hybridrl.parallel import stages, tensor, ulysses

    tensor.check_heads(model, parallel.tp, path)
    text = model.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    ulysses.check_heads(
        heads // parallel.tp, max(1, key_value_heads // parallel.tp), parallel.ulysses
    )
    stages.check_stages(text.num_hidden_layers, parallel.pp, parallel.chunks, "actor.parallel.pp")


def _is_cut(parallel: ParallelConfig) -> bool:
    return max(parallel.tp, parallel.pp, parallel.ulysses, parallel.ring) > 1


def _tiny(config: Config) -> PretrainedConfig:
    from dataclasses import asdict

    from hybridrl.models import tiny_config

    return tiny_config(**asdict(config.model.tiny))

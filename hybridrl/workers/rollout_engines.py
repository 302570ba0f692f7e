"""The rollout engine that the settings ask for."""

from __future__ import annotations

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.models import load_tokenizer
from hybridrl.rollout import RolloutEngine
from hybridrl.workers.engines import ModelSource


def build_rollout(
    source: ModelSource, config: RolloutConfig, device: torch.device, seed: int, job: str
) -> RolloutEngine:
    """vLLM or transformers, with episodes of tools around it if there are any."""
    if config.episode is None:
        return build_generator(source, config, device, seed, job)
    from hybridrl.rollout.episode_class import load_episode
    from hybridrl.rollout.episodes import EpisodeRollout

    episode = load_episode(config.episode)  # first: it is what may be wrong
    return EpisodeRollout(
        build_generator(source, config, device, seed, job),
        episode,
        load_tokenizer(source.tokenizer),
        max_turns=config.max_turns,
        max_turn_tokens=config.max_turn_tokens,
        tool_timeout_s=config.tool_timeout_s,
    )


def build_generator(
    source: ModelSource, config: RolloutConfig, device: torch.device, seed: int, job: str
) -> RolloutEngine:
    """vLLM or transformers alone."""
    if config.engine == "transformers":
        from hybridrl.rollout.transformers import TransformersRollout

        return TransformersRollout(
            source.path,
            load_tokenizer(source.tokenizer),
            source.dtype,
            max_sequences=config.max_sequences,
            eos_token_ids=list(source.eos_token_ids),
            device=device,
        )
    from hybridrl.rollout.vllm import VLLMRollout

    return VLLMRollout(
        source.path,
        source.tokenizer,
        source.dtype,
        config,
        context_length=source.context_length,
        eos_token_ids=list(source.eos_token_ids),
        device=device,
        seed=seed,
        job=job,
    )

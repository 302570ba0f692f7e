"""The rollout engine that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridrl.checkpoint.tensors.tensor_reader import TensorFiles
from hybridrl.config.schema import EnvironmentConfig, RolloutConfig, is_served
from hybridrl.controller import Context
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models import load_config, load_tokenizer
from hybridrl.rollout import RolloutEngine
from hybridrl.systems.unequal_generation.decoder_stage import check_stages
from hybridrl.systems.unequal_generation.generation_plan import (
    GenerationPlan,
    equal_plan,
    read_plan,
)
from hybridrl.workers.training_engines import ModelSource

if TYPE_CHECKING:
    from hybridrl.batch.turn import Episode
    from hybridrl.rollout.playing import PlaysEpisodes


def trained_weights(
    source: ModelSource, train: TrainEngine
) -> Mapping[str, tuple[int, ...]] | None:
    """The shapes of what is trained, by checkpoint name, if the model's folder has nothing else;
    None if an engine that generates may need more than that, or gets it whole. Collective."""
    if train.has_adapters or not Path(source.path).is_dir():
        return None
    stored, shapes = TensorFiles(Path(source.path)).shapes, train.layout().shapes
    form = train.stored_form()
    trained = shapes.keys() if form is None else {part.name for part in form.parts}
    return shapes if stored and stored.keys() <= trained | shapes.keys() else None


def build_rollout(
    source: ModelSource,
    config: RolloutConfig,
    device: torch.device,
    seed: int,
    job: str,
    coming: Mapping[str, tuple[int, ...]] | None = None,
    sleeps: bool = False,
    *,
    environment: EnvironmentConfig | None,
    context: Context,
    peers: dist.ProcessGroup | None = None,
) -> RolloutEngine:
    """What generates, with episodes around it if there are any.

    Args:
        coming, sleeps: See `VLLMRollout`.
        environment: What plays the samples; None, or without a name: nothing does.
        peers: The ranks that share this rank's engine; None: it has one of its own.
    """
    served = environment is not None and is_served(config, environment)
    if config.episode is None and not served:
        return build_generator(source, config, device, seed, job, coming, sleeps)
    from hybridrl.rollout.episode_class import load_episode
    from hybridrl.rollout.lockstep import FollowingRollout, LeadingEngine, LeadingRollout

    episode = None if served else load_episode(config.episode)  # first: it is what may be wrong
    engine = build_generator(source, config, device, seed, job, coming, sleeps)
    if peers is None:
        return _player(engine, episode, source, config, environment, context)
    if dist.get_rank(peers) > 0:
        return FollowingRollout(engine, peers)
    leading = LeadingEngine(engine, peers)
    return LeadingRollout(_player(leading, episode, source, config, environment, context), leading)


def _player(
    engine: RolloutEngine,
    episode: Callable[[], Episode] | None,
    source: ModelSource,
    config: RolloutConfig,
    environment: EnvironmentConfig | None,
    context: Context,
) -> PlaysEpisodes:
    """What plays episodes around an engine: of this class, or with None those of an environment."""
    tokenizer = load_tokenizer(source.tokenizer)
    if episode is None:
        from hybridrl.serving.agent_rollout import agent_rollout

        replica = context.rank // config.parallel.ranks
        folder = Path(context.run_directory) if context.run_directory else None
        return agent_rollout(
            engine,
            tokenizer,
            rollout=config,
            environment=environment,
            model=source.path,
            vocabulary=load_config(source.path).get_text_config().vocab_size,
            context_length=source.context_length,
            replica=replica,
            template=source.template,
            announced_at=folder / f"endpoint-{replica}.json" if folder and config.serve else None,
            failed_at=folder and folder / "failed",
        )
    from hybridrl.rollout.episode_generator import EpisodeRollout

    return EpisodeRollout(
        engine,
        episode,
        tokenizer,
        max_turns=config.max_turns,
        max_turn_tokens=config.max_turn_tokens,
        tool_timeout_s=config.tool_timeout_s,
    )


def build_generator(
    source: ModelSource,
    config: RolloutConfig,
    device: torch.device,
    seed: int,
    job: str,
    coming: Mapping[str, tuple[int, ...]] | None = None,
    sleeps: bool = False,
) -> RolloutEngine:
    """vLLM, transformers or a pipeline alone; see `build_rollout`."""
    if config.engine == "pipeline":
        from hybridrl.systems.unequal_generation.pipeline_engine import PipelineRollout

        return PipelineRollout(
            source.path,
            load_tokenizer(source.tokenizer),
            source.dtype,
            _generation_plan(source, config),
            max_sequences=config.max_sequences,
            eos_token_ids=list(source.eos_token_ids),
            device=device,
        )
    if config.engine == "transformers":
        from hybridrl.rollout.transformers_engine import TransformersRollout

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
        coming=coming,
        sleeps=sleeps,
        adapters=source.adapters,
    )


def _generation_plan(source: ModelSource, config: RolloutConfig) -> GenerationPlan:
    """That of `rollout.plan`, for this model."""
    model = load_config(source.path)
    layers = model.get_text_config().num_hidden_layers
    plan = equal_plan(layers, config.parallel.pp)
    if config.plan is not None:
        plan = read_plan(config.plan)
    check_stages(model, "rollout=pipeline", source.path)
    return plan

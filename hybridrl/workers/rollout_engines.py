"""The rollout engine that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.config.schema import EnvironmentConfig, RolloutConfig, is_served
from hybridrl.controller import WorkerContext
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.model_loading import load_model_config, load_tokenizer
from hybridrl.rollout.partial_stream import PartialGenerator
from hybridrl.rollout.rollout_engine import EngineSetup, RolloutEngine
from hybridrl.rollout.sample_generator import SampleGenerator, SingleTurnGenerator
from hybridrl.workers.training_engines import ModelSource

ENGINES = {
    "vllm": ("hybridrl.rollout.vllm_engine", "VLLMEngine"),
    "transformers": ("hybridrl.rollout.transformers_engine", "TransformersEngine"),
    "pipeline": ("hybridrl.systems.unequal_generation.pipeline_engine", "PipelineEngine"),
}
"""Module and class of each `rollout.engine`; none is imported before it is wanted."""


def find_trained_shapes(
    source: ModelSource, train: TrainEngine
) -> Mapping[str, tuple[int, ...]] | None:
    """Return the shapes of the trained weights by checkpoint name, if the model's folder has
    nothing else; None if an engine that generates may need more, or gets all weights at once.
    Collective."""
    if train.has_adapters or not Path(source.path).is_dir():
        return None
    stored, shapes = TensorReader(Path(source.path)).shapes, train.layout().shapes
    form = train.stored_form()
    trained = shapes.keys() if form is None else {part.name for part in form.parts}
    return shapes if stored and stored.keys() <= trained | shapes.keys() else None


def build_rollout_engine(
    source: ModelSource,
    config: RolloutConfig,
    setup: EngineSetup,
    *,
    environment: EnvironmentConfig | None,
    context: WorkerContext,
    peers: dist.ProcessGroup | None = None,
) -> SampleGenerator:
    """Build what generates: an engine, and episodes where the settings ask for them.

    Args:
        environment: What plays the samples; None, or without a name: nothing does.
        peers: The ranks that share this rank's engine; None: it has one of its own.
    """
    served = environment if environment and is_served(config, environment) else None
    if config.episode is None and served is None:
        turns = SingleTurnGenerator if config.partial is None else PartialGenerator
        return turns(build_inference_engine(setup, config))
    from hybridrl.rollout.episode_generator import EpisodeGenerator, load_episode_class
    from hybridrl.rollout.lockstep import LockstepFollower, LockstepRequests

    # First, because it is what may be wrong.
    episode = load_episode_class(config.episode) if config.episode and not served else None
    engine = build_inference_engine(setup, config)
    if peers is not None and dist.get_rank(peers) > 0:
        return LockstepFollower(engine, peers)
    requests = None if peers is None else LockstepRequests(engine, peers)
    tokenizer = load_tokenizer(source.tokenizer)
    if episode is not None:
        return EpisodeGenerator(engine, episode, tokenizer, config, requests)
    from hybridrl.environments.adapters.environment_adapter import MODEL_NAME
    from hybridrl.serving.agent_rollout import agent_generator
    from hybridrl.serving.renderer_chat import choose_renderer
    from hybridrl.serving.routes import ServedModel

    assert served is not None
    vocabulary = load_model_config(source.path).get_text_config().vocab_size
    chat = choose_renderer(tokenizer, source.path, source.template)
    return agent_generator(
        engine,
        ServedModel(MODEL_NAME, tokenizer, chat, vocabulary, source.context_length),
        config,
        served,
        replica=context.rank // config.parallel.ranks,
        folder=Path(context.run_directory) if context.run_directory else None,
        requests=requests,
    )


def setup_of(
    source: ModelSource, device: torch.device, seed: int, job: str, **options: Any
) -> EngineSetup:
    """Return the setup of an engine that generates with this model; `options` are its others."""
    names = ("path", "tokenizer", "dtype", "eos_token_ids", "context_length", "adapters")
    given = {name: getattr(source, name) for name in names}
    return EngineSetup(**given, device=device, seed=seed, job=job, **options)


def build_inference_engine(setup: EngineSetup, config: RolloutConfig) -> RolloutEngine:
    """Build the engine `rollout.engine`: vLLM, transformers or a pipeline."""
    module, name = ENGINES[config.engine]
    engine: RolloutEngine = getattr(import_module(module), name)(setup, config)
    return engine

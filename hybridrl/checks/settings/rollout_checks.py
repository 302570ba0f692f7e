"""Checks of generation settings."""

from __future__ import annotations

from hybridrl.batch.kept_sets import filters_tokens, restricts_sampling
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.rollout.vllm_options import SPECULATIVE_OPTION, check_engine_options
from hybridrl.system import user_code
from hybridrl.systems.unequal_generation.generation_plan import load_generation_plan
from hybridrl.trainers import load_trainer
from hybridrl.trainers.objectives import has_lossy_weight_sync


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.min_tokens > rollout.max_tokens:
        raise ConfigError(
            f"rollout.min_tokens={rollout.min_tokens}: must be between 0 and "
            f"rollout.max_tokens={rollout.max_tokens}."
        )


def _check_engine(config: Config) -> None:
    rollout = config.rollout
    if rollout.verify_weights and has_lossy_weight_sync(config):
        raise ConfigError(
            f"rollout.weight_sync={rollout.weight_sync} brings weights to the generator that are "
            "not quite the trainer's, and rollout.verify_weights=true ends the job for that. Set "
            "rollout.verify_weights=false: what travels has a checksum."
        )
    apart = config.placement.strategy not in ("flattening", "interleaving")
    if apart and config.actor.lora.rank and rollout.weight_sync not in ("auto", "full"):
        raise ConfigError(
            f"rollout.weight_sync={rollout.weight_sync} with actor.lora.rank="
            f"{config.actor.lora.rank}: adapters go whole, or multiplied into whole weights. Set "
            "rollout.weight_sync=auto."
        )
    if options := rollout.engine_options:
        if rollout.engine != "vllm":
            raise ConfigError(
                f"rollout.engine_options has {', '.join(options)}, which are vLLM's; they need "
                "rollout=vllm."
            )
        check_engine_options(options, rollout.temperature, config.placement.in_flight)
    if rollout.engine != "vllm" and rollout.parallel.tp > 1:
        kept = {
            "transformers": "keeps a whole model on each device",
            "pipeline": "divides a model by layers (rollout.parallel.pp)",
        }
        raise ConfigError(
            f"rollout.parallel.tp={rollout.parallel.tp} needs rollout=vllm; "
            f"rollout={rollout.engine} {kept[rollout.engine]}."
        )
    if rollout.engine != "vllm" and rollout.quantization != "none":
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} needs rollout=vllm, whose kernels "
            "multiply in 8 bits. Set rollout.quantization=none."
        )
    if rollout.engine != "vllm" and rollout.kv_cache != "auto":
        raise ConfigError(
            f"rollout.kv_cache={rollout.kv_cache} needs rollout=vllm; the cache of "
            f"rollout={rollout.engine} is in model.dtype. Set rollout.kv_cache=auto."
        )


def _check_pipeline_plan(config: Config) -> None:
    rollout = config.rollout
    if rollout.engine != "pipeline":
        pp = rollout.parallel.pp
        for name, value in (("parallel.pp", pp if pp > 1 else None), ("plan", rollout.plan)):
            if value:
                raise ConfigError(
                    f"rollout.{name}={value} needs rollout=pipeline, which divides a model by "
                    f"layers; rollout={rollout.engine} does not."
                )
        return
    if rollout.plan is None:
        return
    plan = load_generation_plan(rollout.plan)
    if len(plan.stages) != rollout.parallel.pp:
        raise ConfigError(
            f"rollout.plan={rollout.plan} has {len(plan.stages)} stages, and rollout.parallel.pp="
            f"{rollout.parallel.pp}. Set rollout.parallel.pp={len(plan.stages)}."
        )
    if plan.kl is not None and plan.kl > rollout.max_kl:
        raise ConfigError(
            f"rollout.plan={rollout.plan} puts the generator {plan.kl:.2g} nats a token off the "
            f"model, more than rollout.max_kl={rollout.max_kl:g}. Make another plan for that, or "
            "set a higher rollout.max_kl."
        )


def _check_episode(config: Config) -> None:
    rollout = config.rollout
    if rollout.episode is not None:
        user_code.check_user_code("rollout.episode", rollout.episode)


def _check_routing_replay(config: Config) -> None:
    rollout = config.rollout
    if not rollout.routing_replay:
        return
    if config.trainer.name == "expert_iteration":
        raise ConfigError(
            "rollout.routing_replay=true with trainer.name=expert_iteration: it learns its answers "
            "as if they were given, by the experts that the trainer chooses. Set "
            "rollout.routing_replay=false."
        )
    if rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.routing_replay=true with rollout={rollout.engine}: only vLLM says which "
            "experts took a token. Set rollout=vllm, or rollout.routing_replay=false."
        )
    if rollout.episode is not None or rollout.serve:
        setting = "serve=true" if rollout.serve else f"episode={rollout.episode}"
        raise ConfigError(
            f"rollout.routing_replay=true with rollout.{setting}: of samples of several turns "
            "experts are not kept yet. Set rollout.routing_replay=false."
        )


def _check_kept_sets(config: Config) -> None:
    """Refuse to leave tokens out of the choice where the generator does not say which."""
    rollout = config.rollout
    learns = "algorithm.policy_loss" in load_trainer(config.trainer.name).USES
    if not learns or not restricts_sampling(rollout):
        return
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
    name = next(name for name, none in whole.items() if getattr(rollout, name) != none)
    shown = f"rollout.{name}={getattr(rollout, name)} leaves tokens out when samples are drawn"
    if rollout.engine == "pipeline":
        raise ConfigError(
            f"{shown}, and rollout=pipeline does not say which, so that the trainer cannot leave "
            f"them out, too. Set rollout.{name}={whole[name]} for training, or rollout=vllm."
        )
    if filters_tokens(rollout) and rollout.engine_options.get(SPECULATIVE_OPTION):
        raise ConfigError(
            f"{shown}, and vLLM does not say which of tokens that it guesses ahead "
            f"(rollout.engine_options.{SPECULATIVE_OPTION}). Leave one of the two out."
        )


def _check_partial(config: Config) -> None:
    rollout = config.rollout
    if rollout.partial is None:
        return
    unsupported = {
        "rollout.episode": (rollout.episode, "tools cannot be stopped between two turns"),
        "rollout.serve": (rollout.serve, "programs cannot be stopped between two turns"),
        "environment.name": (config.environment.name, "environments cannot be stopped"),
        "rollout.stop": (rollout.stop, "a text may begin in one step and end in the next"),
        "rollout.routing_replay": (rollout.routing_replay, "experts of begun samples are not kept"),
        "guard.on_nan": (
            config.guard.on_nan == "rewind" and "rewind",
            "a step also learns from prompts of earlier steps, which would not be left out",
        ),
        "rollout.engine": (
            rollout.engine == "pipeline" and "pipeline",
            "it generates a batch to its end",
        ),
    }
    for name, (value, why) in unsupported.items():
        if value:
            raise ConfigError(
                f"rollout.partial={rollout.partial} with {name}={value}: {why}. Leave one of the "
                "two out."
            )


def find_order_obstacle(config: Config) -> str:
    """Return the setting with which prompts cannot be dealt out in the order of their prefixes, or
    would gain nothing, and why; else an empty text."""
    data, rollout, trainer = config.data, config.rollout, load_trainer(config.trainer.name)
    samples = trainer.DATA == "prompts" and trainer.TRAINS
    keeps = rollout.engine_options.get("enable_prefix_caching", True)
    obstacles = {
        f"data.sampler={data.sampler} chooses the rows": data.sampler is not None,
        "data.shuffle=false keeps the order of the file": not data.shuffle,
        f"trainer.name={config.trainer.name} learns from no samples of prompts": not samples,
        f"rollout={rollout.engine} computes each prompt as a whole": rollout.engine != "vllm",
        "rollout.engine_options.enable_prefix_caching=false forgets prefixes": not keeps,
    }
    return next((said for said, holds in obstacles.items() if holds), "")


def _check_prompt_order(config: Config) -> None:
    if config.data.order == "prefix" and (obstacle := find_order_obstacle(config)):
        raise ConfigError(f"data.order=prefix: {obstacle}. Leave one of the two out.")


ROLLOUT_CHECKS = (
    _check_sampling,
    _check_engine,
    _check_pipeline_plan,
    _check_episode,
    _check_routing_replay,
    _check_kept_sets,
    _check_partial,
    _check_prompt_order,
)

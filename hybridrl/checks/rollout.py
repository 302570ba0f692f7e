"""What can be wrong with generation and its samples."""

from __future__ import annotations

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, check_all
from hybridrl.rollout.vllm_options import check_engine_options


def check_rollout(config: Config) -> None:
    """Refuses what could not be generated, or not be learned from.

    Raises:
        ConfigError: names the settings.
    """
    check_all([_check_sampling, _check_engine, _check_episode, _check_replay], config)


def _check_sampling(config: Config) -> None:
    rollout = config.rollout
    if rollout.min_tokens > rollout.max_tokens:
        raise ConfigError(
            f"rollout.min_tokens={rollout.min_tokens}: must be between 0 and "
            f"rollout.max_tokens={rollout.max_tokens}."
        )


def _check_engine(config: Config) -> None:
    from hybridrl.trainers.objectives import syncs_roughly

    rollout = config.rollout
    if rollout.verify_weights and syncs_roughly(config):
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
        if rollout.engine == "transformers":
            raise ConfigError(
                f"rollout.engine_options has {', '.join(options)}, which are vLLM's; they need "
                "rollout=vllm."
            )
        check_engine_options(options, rollout.temperature, config.placement.in_flight)
    if rollout.engine == "transformers" and rollout.parallel.tp > 1:
        raise ConfigError(
            f"rollout.parallel.tp={rollout.parallel.tp} needs rollout=vllm; "
            "rollout=transformers keeps a whole model on each device."
        )
    if rollout.engine == "transformers" and rollout.quantization != "none":
        raise ConfigError(
            f"rollout.quantization={rollout.quantization} needs rollout=vllm, whose kernels "
            "multiply in 8 bits. Set rollout.quantization=none."
        )


def _check_episode(config: Config) -> None:
    from hybridrl.rollout.episode_class import check_episode

    rollout = config.rollout
    if rollout.episode is None:
        return
    check_episode(rollout.episode)
    if rollout.parallel.tp > 1:
        raise ConfigError(
            f"rollout.parallel.tp={rollout.parallel.tp} with rollout.episode="
            f"{rollout.episode}: the devices that share a model must generate the same tokens at "
            "the same time, but each would see the tools answer at another moment. Set "
            "rollout.parallel.tp=1."
        )


def _check_replay(config: Config) -> None:
    rollout = config.rollout
    if not rollout.routing_replay:
        return
    if rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.routing_replay=true with rollout={rollout.engine}: only vLLM says which "
            "experts took a token. Set rollout=vllm, or rollout.routing_replay=false."
        )
    if rollout.episode is not None:
        raise ConfigError(
            f"rollout.routing_replay=true with rollout.episode={rollout.episode}: of samples of "
            "several turns experts are not kept yet. Set rollout.routing_replay=false."
        )

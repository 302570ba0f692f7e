"""What can be wrong with generation and its samples."""

from __future__ import annotations

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.rollout.vllm_options import check_engine_options


def check_rollout(config: Config) -> None:
    """Raises a sentence for the first thing that is wrong.

    Raises:
        ConfigError: names the setting.
    """
    rollout = config.rollout
    if rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature=0: all samples of a prompt would be equal and nothing could be "
            "learned. Evaluation is greedy by itself."
        )
    if not 0 <= rollout.min_tokens <= rollout.max_tokens:
        raise ConfigError(
            f"rollout.min_tokens={rollout.min_tokens}: must be between 0 and "
            f"rollout.max_tokens={rollout.max_tokens}."
        )
    if not 0 < rollout.top_p <= 1:
        raise ConfigError(f"rollout.top_p={rollout.top_p}: must be in (0, 1].")
    if not 0 < rollout.memory_share < 1:
        raise ConfigError(f"rollout.memory_share={rollout.memory_share}: must be in (0, 1).")
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
    _check_episode(config)
    _check_replay(config)


def _check_episode(config: Config) -> None:
    from hybridrl.rollout.episode_class import check_episode

    rollout = config.rollout
    if rollout.max_turn_tokens is not None and rollout.max_turn_tokens <= 0:
        raise ConfigError(
            f"rollout.max_turn_tokens={rollout.max_turn_tokens}: must be more than 0, or null for "
            "turns as long as rollout.max_tokens allows."
        )
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

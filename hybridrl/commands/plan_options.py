"""Options that several kinds of `hybridrl plan` share, resolved to values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.config.schema import Config
    from hybridrl.planner.step.step_calls import SampleLengths
    from hybridrl.system.cluster_spec import ClusterSpec


def planned(settings: Sequence[str]) -> tuple[Config, str]:
    """Return the settings of the job to plan, and a notice, or "", on what they do not name.

    A model of the user's is not planned with the lengths of the built-in task that is learned where
    no data is named.
    """
    from hybridrl.config.task_settings import without_task
    from hybridrl.job.config_resolution import load_config

    config = load_config(settings)
    if config.model.path is None:
        return config, (
            "model.path is not set: this is the plan of a tiny model. Set it to a folder, a hub "
            "name, or a size such as llama-7b."
        )
    if not getattr(config.data.task, "is_default", False):
        return config, ""
    plain = without_task(config)
    data, rollout = replace(plain.data, task=str(config.data.task)), plain.rollout
    return replace(plain, data=data), (
        f"No data is named: prompts of up to data.max_prompt_tokens={data.max_prompt_tokens} and "
        f"responses of up to rollout.max_tokens={rollout.max_tokens} are planned."
    )


def resolve_cluster(config: Config, text: str | None) -> ClusterSpec:
    """Return the cluster that `--devices` names, or the devices that the job gets on this
    machine."""
    from hybridrl.planner.machine import device_catalog as devices

    if text is not None:
        return devices.parse_cluster(text)
    from hybridrl.checks.machine.device_checks import devices_here

    return devices.add_device_memory(devices_here(config))


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--devices` and `--number`, which `devices_here` reads."""
    parser.add_argument(
        "--devices", default="auto", metavar="KIND", help="auto, cpu or cuda (auto)"
    )
    parser.add_argument(
        "--number", type=int, metavar="N", help="how many devices; else every GPU, or two CPU slots"
    )


def devices_here(devices: str, number: int | None) -> ClusterSpec:
    """The devices of this machine that `--devices` and `--number` name.

    Raises:
        ConfigError: if there are no such devices.
    """
    if devices not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--devices {devices}: must be auto, cpu or cuda.")
    from hybridrl.system.cluster_spec import find_local_cluster

    return find_local_cluster(devices, number)


def resolve_tiny_model(config: Config) -> PretrainedConfig | None:
    """Return the configuration of the tiny model; None if the job names a model."""
    if config.model.path is not None:
        return None
    from dataclasses import asdict

    from hybridrl.job.job_inputs import build_tiny_tokenizer
    from hybridrl.models.model_loading import make_tiny_config

    found = make_tiny_config(**asdict(config.model.tiny))
    if not (config.data.task or config.data.sources or config.environment.name):
        raise ConfigError(
            "model.path is not set. Set it to a folder, a hub name, or a size to plan with: "
            "llama-7b, llama-13b, llama-34b, llama-70b."
        )
    found.vocab_size = len(build_tiny_tokenizer(config))
    return found


def parse_lengths(text: str | None) -> SampleLengths | None:
    """Parse `--lengths`; None if it is not given.

    Raises:
        ConfigError: if it says something else.
    """
    if text is None:
        return None
    from hybridrl.planner.sample_lengths import parse_sample_lengths

    return parse_sample_lengths(text, "--lengths")

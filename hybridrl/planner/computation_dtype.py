"""`model.dtype=auto`: the precision that a job computes in, once it is known on what."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridrl.config.schema import Config
from hybridrl.errors import NotPlannedError
from hybridrl.models.model_loading import load_model_config
from hybridrl.models.model_shape import compute_model_shape
from hybridrl.system.device_traits import min_bfloat16_parameters
from hybridrl.system.dtypes import AUTO_DTYPE


def resolve_dtype(config: Config, kind: str) -> Config:
    """Return the configuration with a dtype in place of `auto`: bfloat16 on accelerators, and on
    CPUs that multiply it if the model is large enough; else float32.

    Args:
        config: With the model's folder.
        kind: Of the job's devices. CPUs are taken to be like those of this machine.
    """
    if config.model.dtype != AUTO_DTYPE:
        return config
    least = min_bfloat16_parameters(kind)
    chosen = "float32"
    if least is not None and (not least or _has_parameters(config, least)):
        chosen = "bfloat16"
    return replace(config, model=replace(config.model, dtype=chosen))


def format_dtype_notice(asked: Config, config: Config, kind: str) -> str:
    """Return a sentence for users whose results change with the processor; empty if theirs do not.

    Args:
        asked: As the settings were.
        config: As `resolve_dtype` gave them.
    """
    if asked.model.dtype != AUTO_DTYPE or kind != "cpu" or config.model.dtype != "bfloat16":
        return ""
    return (
        "model.dtype=auto: this model computes in bfloat16, which this machine's processor "
        "multiplies at more than the speed of float32; model.dtype=float32 rounds less."
    )


def detect_device_kind(devices: str) -> str:
    """Return the kind of devices that a job is likely to get: what `devices` says, or what this
    machine has."""
    if devices != AUTO_DTYPE:
        return devices
    return "cuda" if torch.accelerator.is_available() else "cpu"


def _has_parameters(config: Config, least: int) -> bool:
    try:
        shape = compute_model_shape(load_model_config(str(config.model.path)), "float32")
    except NotPlannedError:
        return False
    return shape.parameters.all >= least

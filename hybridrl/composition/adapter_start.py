"""Adapters of an earlier LoRA run, or of peft, as `actor.lora.path` or `model.path`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hybridrl.composition.model_start import ACTOR_ROLE, resolve_model_folder
from hybridrl.config.schema import Config, LoraAdapterConfig
from hybridrl.errors import ConfigError
from hybridrl.system.bounded_files import load_object
from hybridrl.system.hub_access import may_be_hub_name

DESCRIBED = "adapter_config.json"
_PLAIN = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
    "layers_to_transform": ([], None),
    "target_parameters": ([], None),
    "lora_bias": (False, None),
    "trainable_token_indices": ([], {}, None),
    "layer_replication": ([], None),
}
"""What of peft's settings has to be so: these adapters are W + s B A and nothing else."""


def with_adapters(config: Config) -> Config:
    """Return the settings with those of the adapters that training goes on with.

    An adapter folder as `model.path` stands for the model that it was trained on, with
    `actor.lora.path`. Rank, alpha and targets are those of the folder.

    Raises:
        ConfigError: if there are no such adapters, or settings contradict them.
    """
    lora, model = config.actor.lora, config.model
    setting = "actor.lora.path"
    path = resolve_model_folder(lora.path, setting, ACTOR_ROLE)
    if model.path is not None and (Path(model.path).expanduser() / DESCRIBED).is_file():
        if path is not None and Path(path).resolve() != Path(model.path).expanduser().resolve():
            raise ConfigError(
                f"model.path={model.path} holds adapters, and actor.lora.path={lora.path} names "
                "others. Set model.path to the model itself, or leave one of the two out."
            )
        setting, path, model = "model.path", model.path, replace(model, path=None)
    if path is None:
        return config
    folder = Path(path).expanduser()
    described = _described(folder, setting)
    base = str(described.get("base_model_name_or_path") or "")
    found = replace(_settings(described, folder, setting), base_format=lora.base_format)
    _check_same(lora, found, folder)
    if model.path is None:
        model = replace(model, path=_base_folder(base, folder, setting))
    if model.tokenizer is None and (folder / "tokenizer_config.json").is_file():
        model = replace(model, tokenizer=str(folder))
    return replace(config, model=model, actor=replace(config.actor, lora=found))


def _described(folder: Path, setting: str) -> dict[str, Any]:
    try:
        return load_object((folder / DESCRIBED).resolve())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}={folder}: its {DESCRIBED} could not be read ({error}). Name the folder of "
            "a LoRA run, the `model` in it, or a folder that peft has saved."
        ) from error


def _settings(described: dict[str, Any], folder: Path, setting: str) -> LoraAdapterConfig:
    kind, rank, alpha = (described.get(key) for key in ("peft_type", "r", "lora_alpha"))
    targets = described.get("target_modules")
    if kind != "LORA" or not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ConfigError(
            f"{setting}={folder} holds adapters of the kind {kind!r}, and only LORA is trained here"
        )
    for name, usual in _PLAIN.items():
        if described.get(name) not in usual:
            raise ConfigError(
                f"{setting}={folder} was made with {name}={described[name]!r}, which is more than "
                "plain low-rank adapters. Multiply them into their model with peft's "
                "merge_and_unload, and set model.path to the result."
            )
    scale = math.sqrt(rank) if described.get("use_rslora") else 1.0  # then alpha / sqrt(rank)
    named = targets if isinstance(targets, str) else sorted(targets or ())
    return LoraAdapterConfig(rank, alpha * scale, named, str(folder))


def _check_same(given: LoraAdapterConfig, found: LoraAdapterConfig, folder: Path) -> None:
    """Refuse settings beside the folder that differ from its own."""
    usual = LoraAdapterConfig()
    for name in (one.name for one in fields(LoraAdapterConfig) if one.name != "path"):
        asked, is_so = getattr(given, name), getattr(found, name)
        same = sorted(asked) == is_so if isinstance(asked, list) else asked == is_so
        if asked != getattr(usual, name) and not same:
            raise ConfigError(
                f"actor.lora.{name}={asked}: the adapters in {folder} have {is_so}, with which "
                "they go on. Leave this setting out."
            )


def _base_folder(base: str, folder: Path, setting: str) -> str:
    """The model that adapters were trained on."""
    for place in (Path(base).expanduser(), folder / base) if base else ():
        if place.exists():
            return str(place)
    if may_be_hub_name(base):
        return base
    raise ConfigError(
        f"{setting}={folder} holds adapters of the model {base or '(which it does not name)'}, "
        "which is not there. Set model.path to that model's folder, and actor.lora.path to the "
        "adapters."
    )

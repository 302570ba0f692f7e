"""LoRA: small trainable adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685), by peft.

The model stays a plain transformers model: `save_pretrained` writes the adapter alone, and
`merge_adapters` shows its weights as if the adapters had been multiplied in.
"""

from __future__ import annotations

import importlib.util
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config.schema import FULL_FORMAT, LoraAdapterConfig
from hybridrl.errors import ConfigError, MissingPackageError, pip_install, suggest_name
from hybridrl.models.language_model import build_meta_language_model, decoder_of

ADAPTER_NAME = "default"
"""The one adapter that a model has here."""
_ALL_LINEAR = "all-linear"
_SCALAR_HEAD = "score"
"""The scalar head of a critic is new, so it is trained whole."""


def add_adapters(model: PreTrainedModel, settings: LoraAdapterConfig, seed: int = 0) -> None:
    """Freeze `model` and put an adapter beside its linear layers, in place. Parameters on the meta
    device stay there; those of the adapter are where new tensors are.

    Args:
        seed: Of the values that adapters begin with.

    Raises:
        MissingPackageError: without peft.
        ConfigError: if `lora.targets` names no module of the model.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingPackageError(
            f"actor.lora.rank={settings.rank} needs peft, which could not be imported ({error}): "
            f"{pip_install('peft')}."
        ) from error
    scalar = hasattr(model, _SCALAR_HEAD)
    if not scalar:  # which has no `lm_head`, and the targets are those of all roles
        _check_named(model, settings)
    adapter = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_targets(model, settings),
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        modules_to_save=[_SCALAR_HEAD] if scalar else None,
    )
    try:
        with _off_meta(model):
            model.add_adapter(adapter, ADAPTER_NAME)
    except ValueError as error:
        raise ConfigError(f"actor.lora.targets={settings.targets}: {error}") from error
    _draw(model, seed)


def load_adapters(model: PreTrainedModel, folder: str) -> None:
    """Give the adapters of `model` the values that a folder of peft's has. Heads are not adapters.

    Raises:
        ConfigError: if the folder has other adapters than the model.
    """
    parameters = dict(model.named_parameters())
    with _opened(folder) as file, torch.no_grad():
        for name, stored in _stored(model, folder, file).items():
            parameters[name].copy_(file.get_tensor(stored))


def _opened(folder: str) -> Any:
    try:
        return safe_open(Path(folder) / "adapter_model.safetensors", framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"actor.lora.path={folder}: its adapter_model.safetensors could not be read ({error}). "
            "Copy or train the adapters again, or save them as safetensors."
        ) from error


def _stored(model: PreTrainedModel, folder: str, file: Any) -> dict[str, str]:
    """Return the names in a file of the model's adapters, by their names in the model.

    Raises:
        ConfigError: if the file has other tensors, or tensors of other shapes.
    """
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    # peft asks for a scalar head as well, which is no adapter.
    names = {k: v for k, v in find_peft_names(model, shapes).items() if ".lora_" in k}
    there = set(file.keys())
    lacks = [stored for stored in names.values() if stored not in there]
    further = sorted(there - set(names.values()))
    if lacks or further:
        what = f"has no `{lacks[0]}`" if lacks else f"has `{further[0]}`"
        raise ConfigError(
            f"actor.lora.path={folder}: its file {what}, so it belongs to another model than "
            f"model.path={model.name_or_path}, or to other modules. The model has "
            f"{len(names)} tensors of adapters, the file {len(there)}. Name the model that the "
            "adapters were trained on."
        )
    for name, stored in names.items():
        if (shape := file.get_slice(stored).get_shape()) != shapes[name]:
            raise ConfigError(
                f"actor.lora.path={folder}: `{stored}` has the shape {shape}, and the model needs "
                f"{shapes[name]}. Name the model that the adapters were trained on."
            )
    return names


def check_lora_targets(config: PretrainedConfig, settings: LoraAdapterConfig) -> None:
    """Refuse targets that a language model of this architecture lacks, and adapters
    (`lora.path`) that do not fit it, without its weights.

    Raises:
        ConfigError: if `lora.targets` names no module of the model, or adapters are of another.
    """
    is_whole = settings.base_format == FULL_FORMAT
    is_usual = settings.targets == _ALL_LINEAR and settings.path is None and is_whole
    # That peft is missing is told elsewhere.
    if settings.rank is None or is_usual or importlib.util.find_spec("peft") is None:
        return
    try:
        model = build_meta_language_model(config)
    except ValueError:  # it is no language model, which is told elsewhere, too
        return
    if not is_whole and not find_frozen_linears(model):
        raise ConfigError(
            f"actor.lora.base_format={settings.base_format} is for models with linear layers, and "
            f"{type(model).__name__} has none. Leave it out."
        )
    add_adapters(model, settings)
    if settings.path is not None:
        with _opened(settings.path) as file:
            _stored(model, settings.path, file)


def _check_named(model: PreTrainedModel, settings: LoraAdapterConfig) -> None:
    """Refuse a target that names no module; peft overlooks it if another target matches."""
    if isinstance(settings.targets, str):
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in settings.targets:
        if not any(name.endswith(f".{target}") for name in names):
            if settings.path is not None:
                raise ConfigError(
                    f"actor.lora.path={settings.path} adapts `{target}`, which the model does not "
                    "have. Name the model that the adapters were trained on."
                )
            found = (name for name, m in model.named_modules() if type(m) is nn.Linear)
            linear = {name.rpartition(".")[2] for name in found}
            raise ConfigError(
                f"actor.lora.targets={list(settings.targets)}: the model has no module `{target}`; "
                f"its linear layers are {', '.join(sorted(linear))}.{suggest_name(target, linear)}"
            )


def _targets(model: PreTrainedModel, settings: LoraAdapterConfig) -> str | list[str]:
    """Return the modules that peft is to adapt. All linear layers are modules here: the matrices of
    experts, which are a parameter together, stay as they are, and so do the layers beside them,
    whose names mean the experts' to peft. In a class with towers, which are built where the adapter
    is loaded, the decoder's layers are named by their path."""
    modules, decoder = dict(model.named_modules()), decoder_of(model)
    has_towers = decoder is not model.base_model
    blocks = {
        name.split(".")[-2]
        for name, module in modules.items()
        if any(p.ndim > 2 for p in module.parameters(recurse=False)) and "." in name
    }
    if settings.targets != _ALL_LINEAR:
        if isinstance(settings.targets, str):
            return settings.targets
        leaves = list(settings.targets)
    elif not blocks and not has_towers:
        return _ALL_LINEAR
    else:
        head = model.get_output_embeddings()
        linear = (name for name, m in modules.items() if type(m) is nn.Linear and m is not head)
        plain = (name.rpartition(".")[2] for name in linear if blocks.isdisjoint(name.split(".")))
        leaves = sorted(set(plain) - {_SCALAR_HEAD})
    if not has_towers:
        return leaves
    path = next(name for name, module in modules.items() if module is decoder)
    return rf"{re.escape(path)}\..*\.({'|'.join(map(re.escape, leaves))})"


def _draw(model: PreTrainedModel, seed: int) -> None:
    """Initialize adapters as peft does, but by the seed and the layer's name, alike everywhere."""
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            if hasattr(module, "reset_lora_parameters"):
                torch.default_generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                module.reset_lora_parameters(ADAPTER_NAME, init_lora_weights=True)


@contextmanager
def _off_meta(model: nn.Module) -> Iterator[None]:
    """Put meta parameters on the CPU, without memory, inside the block; adapters are then real."""
    empty = [parameter for parameter in model.parameters() if parameter.is_meta]

    def replace_all(make: Callable[[nn.Parameter], Tensor]) -> None:
        for each in empty:
            torch.utils.swap_tensors(each, nn.Parameter(make(each), each.requires_grad))

    replace_all(lambda each: torch.zeros((), dtype=each.dtype, device="cpu").expand(each.shape))
    try:
        yield
    finally:
        replace_all(lambda each: torch.empty_like(each, device="meta"))


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether `add_adapters` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def find_frozen_linears(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the linear layers of the decoder below adapters or without: not the head."""
    found = (m for name, m in decoder_of(model).named_modules() if ".lora_" not in name)
    return [module for module in found if type(module) is nn.Linear]


def find_peft_names(model: PreTrainedModel, parameters: Iterable[str]) -> dict[str, str]:
    """Return peft's file names of the adapter's parameters, by their names in the model."""
    marks = {name: torch.empty(0, device="meta") for name in parameters}
    stored = model.get_adapter_state_dict(ADAPTER_NAME, state_dict=marks)
    found = {id(mark): name for name, mark in stored.items()}
    return {
        name: f"base_model.model.{found[id(mark)]}"  # as `save_pretrained` does for peft
        for name, mark in marks.items()
        if id(mark) in found
    }


def merge_adapters(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under their checkpoint names, each with its adapter multiplied in: W + s B A.
    Weights of layers that keep them in few bits, which are no parameters, are brought back.

    Args:
        parameters: The model's parameters whole, in the order of `named_parameters`.
    """
    scaling = {
        name: module.scaling[ADAPTER_NAME]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    base: dict[str, Tensor] = {}
    down: dict[str, Tensor] = {}
    for name, tensor in parameters:
        module, _, leaf = name.partition(".base_layer.")
        if leaf:
            if leaf == "weight" and module in scaling:
                base[module] = tensor
            else:
                yield f"{module}.{leaf}", tensor
            continue
        module, _, leaf = name.partition(".lora_")
        if leaf.startswith("A."):
            down[module] = tensor
        elif leaf.startswith("B."):
            # peft makes a layer's weight, A and B in this order, so all three are here.
            weight = base.pop(module, None)
            if weight is None:
                weight = model.get_submodule(f"{module}.base_layer").dequantised()
            yield f"{module}.weight", weight + scaling[module] * (tensor @ down.pop(module))
        else:
            yield name, tensor
    for name, layer in model.named_modules():
        if hasattr(layer, "dequantised") and not name.endswith(".base_layer"):
            yield f"{name}.weight", layer.dequantised()

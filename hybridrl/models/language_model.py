"""The language model inside a model of the class that its folder names.

Published classes often hold more: towers that read images and sound, projectors, heads that predict
further tokens. Only the decoder and its head are built and trained. The other tensors stay in the
folder's files, from which they are copied when a model is saved (see `stored_tensors`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridrl.errors import ConfigError

_TOWER = {
    **{"depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32},
    **{"num_heads": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
}
"""How towers are built, which takes time although they are thrown away."""


def class_of(config: PretrainedConfig, *, scalar: bool = False) -> type[PreTrainedModel] | None:
    """Return the class of transformers that a model is loaded with: the one that its config.json
    names, if it generates from such a configuration, else the usual one of its type; None if there
    is none.

    Args:
        scalar: With a scalar head in place of logits, which no class that generates has.
    """
    kind = type(config)
    if scalar:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(kind, None)
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if _generates(named) and issubclass(kind, named.config_class):
            return named
    mappings = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found = next((one[kind] for one in mappings if kind in one), None)
    return found[0] if isinstance(found, tuple) else found


def architecture_key(config: PretrainedConfig, *facts: object) -> str:
    """Return what tells an architecture from others, wherever its weights are, and further facts
    about it."""
    known = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return repr((sorted(known.items()), *facts))


def check_scalar(config: PretrainedConfig, who: str) -> None:
    """Refuse a model that has no class with a scalar head.

    Raises:
        ConfigError: begins with `who`.
    """
    if class_of(config, scalar=True) is None:
        raise ConfigError(
            f"{who} cannot be a critic or a reward model: transformers has no class of the type "
            f"`{config.model_type}` with a scalar head. Choose another model for that role, or an "
            "algorithm without one."
        )


def _class_and_config(
    config: PretrainedConfig, scalar: bool
) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Return the class, and a copy of the configuration, or of its part, that the class takes."""
    kind, config = class_of(config, scalar=scalar), copy.deepcopy(config)
    if kind is None:
        raise ValueError(f"transformers has no such class of the type `{config.model_type}`")
    text = config.get_text_config()
    is_text = not isinstance(config, kind.config_class) and isinstance(text, kind.config_class)
    return kind, text if is_text else config


def read_language_model(
    path: str, config: PretrainedConfig, *, scalar: bool = False, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a folder's language model in its class; return it, and transformers' report of it.

    Args:
        config: Of the folder.
        options: Of `from_pretrained`.

    Raises:
        ValueError: as `build_language_model` does.
    """
    kind, config = _class_and_config(config, scalar)
    model, report = kind.from_pretrained(path, config=config, output_loading_info=True, **options)
    return without_towers(model), report


def build_language_model(
    config: PretrainedConfig, *, scalar: bool = False, **options: Any
) -> PreTrainedModel:
    """Build a language model of random weights, in its class.

    Args:
        config: Is not changed.
        options: Of `from_config`.

    Raises:
        ValueError: if transformers has no such class, or it has no decoder with a head.
    """
    kind, config = _class_and_config(config, scalar)
    try:
        with _narrow_towers(config):
            model = kind._from_config(config, **options)
    except Exception:  # of many kinds: towers may need what was narrowed
        model = kind._from_config(config, **options)
    return without_towers(model)


def build_meta_language_model(
    config: PretrainedConfig, *, scalar: bool = False, **options: Any
) -> PreTrainedModel:
    """Build a language model on torch's meta device, as `build_language_model` does: its parameters
    have shapes and no values."""
    with torch.device("meta"):
        return build_language_model(config, scalar=scalar, **options)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that makes the hidden states of text: embedding, layers, norm."""
    if model.config.get_text_config() is model.config:
        return model.base_model
    found = model.get_decoder()
    while found.base_model is not found:
        found = found.base_model
    return found


def attention_of(model: PreTrainedModel) -> str:
    """Return the name under which transformers knows the model's attention."""
    return str(model.config._attn_implementation)


def without_towers(model: PreTrainedModel) -> PreTrainedModel:
    """Remove everything but decoder and head from a model, in place, and return it.

    Raises:
        ValueError: if it has none.
    """
    decoder, head = decoder_of(model), model.get_output_embeddings()
    head = getattr(model, "score", None) if head is None else head
    if decoder is model or head is None:
        raise ValueError(f"{type(model).__name__} has no decoder with a head")
    if decoder is not model.base_model:
        _keep_only(model, {decoder, head})
    return model


def _keep_only(module: nn.Module, kept: set[nn.Module]) -> None:
    """Put None in place of every module that neither is one of `kept` nor holds one."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, None)
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            setattr(module, name, None)
        else:
            _keep_only(child, kept)


def _generates(kind: Any) -> bool:
    is_model = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    return is_model and kind.config_class is not None and kind.can_generate()


@contextlib.contextmanager
def _narrow_towers(config: PretrainedConfig) -> Iterator[None]:
    """Make a configuration ask for small parts beside its language model, inside the block."""
    text, before = config.get_text_config(), []
    for name in config.sub_configs:
        tower = getattr(config, name, None)
        if not isinstance(tower, PretrainedConfig) or tower is text:
            continue
        for setting, value in _TOWER.items():
            if isinstance(getattr(tower, setting, None), int):
                before.append((tower, setting, getattr(tower, setting)))
                setattr(tower, setting, value)
    try:
        yield
    finally:
        for tower, setting, value in before:
            setattr(tower, setting, value)

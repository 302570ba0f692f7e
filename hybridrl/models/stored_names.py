"""Under which names, and in which form, transformers keeps a model's parameters in files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion


def stored_name(name: str) -> str:
    """What a parameter beside which there is an adapter is called in the model's own files."""
    return name.replace(".base_layer.", ".")


def is_converted(model: PreTrainedModel) -> bool:
    """Whether files have other tensors than the parameters: of some models each expert alone."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return any(isinstance(one, WeightConverter) for one in conversions)


def is_stored_as_named(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether transformers saves parameters of these names and shapes as they are."""
    if is_converted(model):
        return False
    mine = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    stored = revert_weight_conversion(model, mine)
    left_out = set(model._keys_to_ignore_on_save or ())
    kept = {name: tuple(tensor.shape) for name, tensor in stored.items() if name not in left_out}
    return kept == dict(shapes)

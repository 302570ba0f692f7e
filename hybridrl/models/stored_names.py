"""Under which names, and in which form, transformers keeps a model's parameters in files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from hybridrl.checkpoint.file_plan import MODEL
from hybridrl.models.adapters import adapter_names, has_adapters

ADAPTER_STEM = "adapter_model"
"""What the name of an adapter's file begins with, as peft has it."""


class StoredForm(NamedTuple):
    """How a model's weights stand in files.

    Attributes:
        stem: What the names of the files begin with.
        names: Of the tensors in them, by parameter; with adapters, of theirs alone.
    """

    stem: str
    names: Mapping[str, str]


def most_bytes(stem: str, file_bytes: int) -> int:
    """Of one file: peft opens a single one only, so an adapter's is never split."""
    return sys.maxsize if stem == ADAPTER_STEM else file_bytes


def stored_form(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> StoredForm | None:
    """The form in which transformers, or peft, keeps a model whose parameters have these names and
    shapes; None if tensors of files are others than the parameters."""
    if has_adapters(model):
        return StoredForm(ADAPTER_STEM, adapter_names(model, shapes))
    if is_stored_as_named(model, shapes):
        return StoredForm(MODEL, {name: name for name in shapes})
    return None


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

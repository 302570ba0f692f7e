"""Adapters multiplied into the base that they were trained around, as a model folder of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.composition.adapter_start import with_adapters
from hybridrl.config.schema import NF4_FORMAT, Config, ModelConfig
from hybridrl.errors import ConfigError
from hybridrl.models.language_model import decoder_of
from hybridrl.models.lora import ADAPTER_NAME, add_adapters, load_adapters, merge_adapters
from hybridrl.models.model_loading import load_model, load_tokenizer
from hybridrl.quantization.nf4_base import quantize_base
from hybridrl.system.dtypes import DTYPES


@torch.no_grad()
def export_merged_model(
    place: str, base_format: str | None, target: Path, dtype: str, file_bytes: int
) -> int:
    """Write the weights that training computed with; return their bytes. Needs memory for two
    copies of the model, one in float32.

    Args:
        place: Folder of the adapters, which names their base.
        base_format: As `actor.lora.base_format`: a base in NF4 is brought back from it.

    Raises:
        ConfigError: without such adapters, or if the class has more than a language model.
    """
    config = with_adapters(Config(model=ModelConfig(path=place)))
    lora, path = config.actor.lora, str(config.model.path)
    if lora.path is None:
        raise ConfigError(f"--merged: no adapters were found in {place}. Leave it out.")
    model = load_model(path, "float32")
    if decoder_of(model) is not model.base_model:
        raise ConfigError(f"--merged: {path} has more than a language model. Merge them by peft.")
    add_adapters(model, lora)
    load_adapters(model, lora.path)
    if base_format == NF4_FORMAT:
        quantize_base(model, None)
    merged = merge_adapters(model, model.named_parameters())
    weights = {name: weight.to(DTYPES[dtype]) for name, weight in merged}
    model.delete_adapter(ADAPTER_NAME)  # or it alone would be written
    model.config.dtype = dtype
    model.save_pretrained(target, state_dict=weights, max_shard_size=file_bytes)
    load_tokenizer(place).save_pretrained(target)
    return sum(weight.nbytes for weight in weights.values())

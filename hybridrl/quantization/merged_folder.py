"""Adapters multiplied into the base that they were trained around, as a model of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridrl.config.schema import NF4_FORMAT, LoraAdapterConfig
from hybridrl.errors import ConfigError
from hybridrl.models.language_model import build_language_model, decoder_of
from hybridrl.models.lora import add_adapters, load_adapters, merge_adapters
from hybridrl.models.model_loading import load_model
from hybridrl.quantization.nf4_base import quantize_base
from hybridrl.system.dtypes import DTYPES


@torch.no_grad()
def save_merged_model(
    path: str, lora: LoraAdapterConfig, folder: Path, dtype: str, file_bytes: int
) -> int:
    """Write the weights that training computed with; return their bytes. Needs memory for two
    copies of the model, one in float32.

    Args:
        path: The base, a folder or hub name.
        lora: `path` names the folder of the adapters; a base in NF4 is brought back from it.

    Raises:
        ConfigError: if they do not fit each other, or the class has more than a language model.
    """
    model = load_model(path, "float32")
    if decoder_of(model) is not model.base_model:
        raise ConfigError(
            f"{path}: only adapters of plain language models are merged here. Leave --merged out, "
            "and merge them by peft."
        )
    add_adapters(model, lora)
    load_adapters(model, str(lora.path))
    if lora.base_format == NF4_FORMAT:
        quantize_base(model, None)
    merged = merge_adapters(model, model.named_parameters())
    weights = {name: weight.to(DTYPES[dtype]) for name, weight in merged}
    with torch.device("meta"):
        whole = build_language_model(model.config, dtype=DTYPES[dtype])
    whole.load_state_dict(weights, strict=False, assign=True)
    whole.tie_weights()
    whole.generation_config = model.generation_config
    whole.save_pretrained(folder, max_shard_size=file_bytes)
    return sum(weight.nbytes for weight in weights.values())

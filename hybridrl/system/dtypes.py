"""The dtypes of models by the names that settings use."""

from collections.abc import Mapping
from typing import Any

import torch

AUTO_DTYPE = "auto"
"""In their place: what suits the devices and the model."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def with_dtype(described: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A config.json that names this precision, where it has named one before: some name it for the
    language model alone, some by the older `torch_dtype`."""
    names = [name for name in ("dtype", "torch_dtype") if name in described] or ["dtype"]
    found = {**described, **dict.fromkeys(names, dtype)}
    text = found.get("text_config")
    if isinstance(text, dict):
        inside = [name for name in ("dtype", "torch_dtype") if name in text]
        found["text_config"] = {**text, **dict.fromkeys(inside, dtype)}
    return found

"""The number formats of models, by the names that settings use."""

import torch

AUTO = "auto"
"""In their place: what suits the devices and the model."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

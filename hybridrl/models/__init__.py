"""The loading of transformers models, and their forward over packed samples."""

from hybridrl.models.folder_checks import check_model_tensors, check_weight_files
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.model_loading import (
    check_single_label,
    load_model,
    load_model_config,
    load_tokenizer,
    make_tiny_config,
    make_tiny_model,
    open_model,
    read_stored_dtype,
)
from hybridrl.models.packed_models import (
    CausalPolicy,
    PackedModel,
    PackedSamples,
    PackingMetadata,
    SampleLayout,
    ScalarModel,
)
from hybridrl.models.packing_trial import resolve_sample_layout
from hybridrl.models.trained_parts import trained_parts

__all__ = [
    "CausalPolicy",
    "PackedModel",
    "PackedSamples",
    "PackingMetadata",
    "SampleLayout",
    "ScalarModel",
    "check_model_tensors",
    "check_single_label",
    "check_weight_files",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "make_tiny_config",
    "make_tiny_model",
    "open_model",
    "read_stored_dtype",
    "resolve_sample_layout",
    "token_log_probs",
    "trained_parts",
]

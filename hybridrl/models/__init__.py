"""The loading of transformers models, and their forward over packed samples."""

from hybridrl.models.folder_checks import check_complete, check_files
from hybridrl.models.log_probs import token_log_probs
from hybridrl.models.model_loading import (
    check_labels,
    load_config,
    load_model,
    load_scalar_model,
    load_tokenizer,
    make_tiny_model,
    stored_dtype,
    tiny_config,
    unread_model,
    unread_scalar_model,
)
from hybridrl.models.packed_models import CausalPolicy, PackedModel, ScalarModel
from hybridrl.models.packing import PackedSamples, Packing, Rows
from hybridrl.models.packing_trial import admit
from hybridrl.models.trained_parts import trained_parts

__all__ = [
    "CausalPolicy",
    "PackedModel",
    "PackedSamples",
    "Packing",
    "Rows",
    "ScalarModel",
    "admit",
    "check_complete",
    "check_files",
    "check_labels",
    "load_config",
    "load_model",
    "load_scalar_model",
    "load_tokenizer",
    "make_tiny_model",
    "stored_dtype",
    "tiny_config",
    "token_log_probs",
    "trained_parts",
    "unread_model",
    "unread_scalar_model",
]

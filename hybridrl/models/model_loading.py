"""The loading of models and tokenizers from a Hugging Face folder or hub name."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.errors import ConfigError
from hybridrl.models.folder_checks import (
    SCALAR_HEAD_PREFIX,
    check_loaded_tensors,
    silence_transformers,
)
from hybridrl.models.language_model import decoder_of, read_language_model
from hybridrl.models.meta_model import build_meta_model
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.system.dtypes import DTYPES

logging.disable_progress_bar()


def load_model_config(path: str, setting: str = "model.path") -> PretrainedConfig:
    """Load the architecture of the model at `path`, which `setting` names in errors."""
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # of many kinds: a config.json may hold anything
        raise ConfigError(
            f"{setting}={path}: its config.json could not be read: {_first_line(error)}"
        ) from error


def read_stored_dtype(path: str) -> str:
    """Return the name of the dtype in which the model at `path` is stored; else `float32`."""
    names, config = {dtype: name for name, dtype in DTYPES.items()}, load_model_config(path)
    said = [getattr(one, "dtype", None) for one in (config, config.get_text_config())]
    return next((names[dtype] for dtype in said if dtype in names), "float32")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `path`."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # libraries raise many kinds
        raise ConfigError(
            f"No tokenizer could be loaded from {path} (model.tokenizer, or model.path where that "
            f"is not set): {_first_line(error)}"
        ) from error


def load_model(
    path: str, dtype: str, *, scalar: bool = False, needs_head: bool = True
) -> PreTrainedModel:
    """Load the model at `path`, on the CPU, with packed attention.

    Args:
        scalar: With a scalar head in place of logits. A sequence-classification folder with one
            label keeps its head. A causal language model gets a new one of zeros, which says 0 of
            everything until it has learned, or is refused.
        needs_head: It will never learn: without a scalar head of its own it is refused.
    """
    config, who = _config_of(path, scalar), path if scalar else f"model.path={path}"
    options = {"dtype": DTYPES[dtype], "attn_implementation": PACKED_ATTENTION}
    try:
        with silence_transformers():
            model, found = read_language_model(path, config, scalar=scalar, **options)
    except Exception as error:  # libraries raise many kinds
        head = " with a scalar head" if scalar else ""
        raise ConfigError(f"{who} could not be loaded{head}: {_first_line(error)}") from error
    check_loaded_tensors(found, who, needs_head=needs_head)
    if scalar and any(name.startswith(SCALAR_HEAD_PREFIX) for name in found["missing_keys"]):
        torch.nn.init.zeros_(model.score.weight)
    model.config.use_cache = False
    return model


def open_model(
    path: str, *, scalar: bool = False, needs_head: bool = True
) -> tuple[PreTrainedModel, TensorReader | None]:
    """Open the model at `path` in float32 as `load_model` does, with parameters on the meta device,
    and return the files that they are in. Where weights cannot be read by parts, the parameters are
    real, and the files are None if they do not have the numbers of the model."""
    config = _config_of(path, scalar)
    found = build_meta_model(path, config, scalar=scalar)
    if found is None or (scalar and needs_head and "score.weight" not in found[1].shapes):
        model = load_model(path, "float32", scalar=scalar, needs_head=needs_head)
        return model, _files_of(path, config, model)
    found[0].config.use_cache = False
    return found


def open_feature_model(
    path: str, features: int, seed: int
) -> tuple[PreTrainedModel, TensorReader | None]:
    """Open the model at `path` as `open_model` does, on the CPU, with a head of several outputs:
    the first is the scalar head of `path`, or zeros; the others are random."""
    model = load_model(path, "float32", scalar=True, needs_head=False)
    files = _files_of(path, _config_of(path, True), model)
    first = model.score.weight.data
    random = torch.Generator().manual_seed(seed)
    others = torch.randn(features - 1, first.shape[1], generator=random) / first.shape[1] ** 0.5
    model.score = torch.nn.Linear(first.shape[1], features, bias=False)
    model.score.weight.data = torch.cat([first, others])
    model.config.num_labels = model.num_labels = features
    return model, files


def _config_of(path: str, scalar: bool) -> PretrainedConfig:
    config = load_model_config(path)
    if scalar:
        check_single_label(config, path)
        config.num_labels = 1
    return config


def find_local_folder(path: str) -> Path | None:
    """Return the folder of a model, or of the hub's copy here; None if it was not kept, or `path`
    is no name of the hub."""
    if (folder := Path(path)).is_dir():
        return folder
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(path, local_files_only=True))
    return None


def _files_of(path: str, config: PretrainedConfig, model: PreTrainedModel) -> TensorReader | None:
    """Return the files that a model was read from: those of the folder, or of the hub's copy here.

    Raises:
        ConfigError: if the model had more than a language model, and it could not be saved with it.
    """
    folder = None if getattr(config, "quantization_config", None) else find_local_folder(path)
    if folder is not None and (files := TensorReader(folder)).shapes:
        return files
    if decoder_of(model) is not model.base_model:
        raise ConfigError(
            f"{path}: only the language model of a {type(model).__name__} is trained. Its other "
            "tensors are copied when it is saved, which needs safetensors files that are not "
            "quantised. Save it as such first, with save_pretrained of its class."
        )
    return None


def check_single_label(config: PretrainedConfig, who: str) -> None:
    """Refuse a classifier of more than one label.

    Raises:
        ConfigError: begins with `who`.
    """
    classifies = any("Classification" in name for name in config.architectures or ())
    if classifies and config.num_labels != 1:
        raise ConfigError(
            f"{who} classifies into {config.num_labels} labels; a critic or a reward model has "
            "one (num_labels=1). Of a model of algorithm=meta_reward_model, `hybridrl adapt` makes "
            "one."
        )


def make_tiny_config(
    *, hidden_size: int, layers: int, heads: int, context: int, experts: int = 0
) -> PretrainedConfig:
    """Return the architecture of `make_tiny_model`, but for its vocabulary: Qwen2's, or with
    experts Qwen3-MoE's, with as many parameters for a token."""
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # Half as many where that can be: each is read by equally many heads.
        "num_key_value_heads": next(n for n in range(max(1, heads // 2), 0, -1) if heads % n == 0),
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }
    if not experts:
        return Qwen2Config(**shape)
    chosen = min(2, experts)
    return Qwen3MoeConfig(
        **shape,
        head_dim=hidden_size // heads,
        moe_intermediate_size=4 * hidden_size // chosen,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
    )


def make_tiny_model(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, seed: int, **shape: int
) -> Path:
    """Write a model of random weights and its tokenizer to `folder`.

    Args:
        shape: See `make_tiny_config`.
    """
    config = make_tiny_config(**shape)
    config.vocab_size = len(tokenizer)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]

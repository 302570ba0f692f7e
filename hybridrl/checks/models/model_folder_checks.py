"""Checks of model folders that need neither a worker nor the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system.bounded_files import load_object
from hybridrl.system.hub_access import find_hub_problem, may_be_hub_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_NON_GENERATIVE_CLASSES = ("Classification", "MaskedLM", "QuestionAnswering")
"""In the names of classes that transformers would load as a language model, and that are none."""
_DEQUANTIZED_METHODS = ("mxfp4",)
"""Quantised folders that transformers reads as plain weights."""


def check_model(path: str, setting: str = "model.path", *, scalar: bool, learns: bool) -> None:
    """Refuse a model that cannot be trained, or cannot score.

    A path that is no folder here is taken for a hub name, of which nothing is known; see
    `check_hub_model`.

    Args:
        scalar: It is to end in one number: a critic or a reward model.
        learns: It is trained, so that a scalar head may be new.

    Raises:
        ConfigError: naming `setting`, and what is wrong with the folder or its files.
    """
    _check_model_path(path, setting)
    if not Path(path).is_dir():
        return
    from hybridrl.models.folder_checks import check_model_tensors, check_weight_files
    from hybridrl.models.language_model import check_scalar
    from hybridrl.models.model_loading import check_single_label, load_model_config

    described = _read_model_config(path, setting)
    _check_model_type(described, path, setting)
    config = load_model_config(path, setting)
    if getattr(config.get_text_config(), "num_attention_heads", None) is None:
        raise ConfigError(
            f"{setting}={path} is of the type `{config.model_type}`, which has no attention heads, "
            "and models are packed, cut and planned by theirs. Take a transformer, or a model that "
            "has both kinds of layers."
        )
    if not scalar:
        _check_causal(config, path, setting)
    if said := refusal_of_quantised(path, setting):
        raise ConfigError(said)
    if _find_quantization_method(described) is None:
        check_weight_files(path, setting)
    if scalar:
        check_single_label(config, f"{setting}={path}")
        check_scalar(config, f"{setting}={path}")
    check_model_tensors(path, setting, config, scalar=scalar, needs_head=scalar and not learns)


def refusal_of_quantised(path: str, setting: str) -> str:
    """Return the sentence that refuses quantized weights, which cannot be trained; empty if a start
    takes them."""
    method = _find_quantization_method(_read_model_config(path, setting))
    if method in (None, *_DEQUANTIZED_METHODS):
        return ""
    return (
        f"{setting}={path} is quantised ({method}), and models are trained, and score, with "
        "whole weights. Take the model that it was made from."
    )


def check_generator(path: str, setting: str) -> None:
    """Refuse a judge's folder that no engine could load; the engine itself checks the model.

    Raises:
        ConfigError: naming `setting`, and what is wrong with the folder or its files.
    """
    _check_model_path(path, setting)
    if Path(path).is_dir() and _find_quantization_method(_read_model_config(path, setting)) is None:
        from hybridrl.models.folder_checks import check_weight_files

        check_weight_files(path, setting)


def check_hub_model(path: str, setting: str) -> None:
    """Ask the Hugging Face hub for a model that is not a local folder; takes a few seconds at most.

    Raises:
        ConfigError: there is no such folder, and the hub has none of that name or cannot be
            asked; names `setting`.
    """
    if not Path(path).is_dir() and (why := find_hub_problem(path, "model")) is not None:
        raise ConfigError(
            f"{setting}={path}: there is no such folder (seen from {Path.cwd()}), and the Hugging "
            f"Face hub {why}. Give the path of a folder, or put the model into the hub's cache on "
            "this machine (`hf download`)."
        )


def _check_model_path(path: str, setting: str) -> None:
    """Refuse a path that is neither a model folder nor a hub name."""
    folder = Path(path)
    if not folder.exists():
        if not may_be_hub_name(path):
            near = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
            raise ConfigError(
                f"{setting}={path}: there is no such folder (seen from {Path.cwd()})."
                f"{suggest_name(folder.name, near)}"
            )
        return
    if not folder.is_dir():
        raise ConfigError(f"{setting}={path} is a file; name the folder of a Hugging Face model.")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{setting}={path} holds the adapters of a LoRA run, not a model (only model.path and "
            "actor.lora.path may). Multiply them in first: "
            "peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(new_folder), and copy the tokenizer's files."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting}={path} has no config.json, so it is not a Hugging Face model folder."
        )
    if not has_weights(folder):
        raise ConfigError(
            f"{setting}={path} has a config.json but no weights "
            f"({' or '.join(_WEIGHT_PATTERNS)}). Was the download cut short?"
        )


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds weight files."""
    return any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS)


def _read_model_config(path: str, setting: str) -> dict[str, Any]:
    """Read `config.json`, which is a link in the hub's cache, as a dictionary."""
    try:
        return load_object((Path(path) / "config.json").resolve())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}={path}: its config.json could not be read: {error}. Copy or download the "
            "model again."
        ) from error


def _find_quantization_method(described: dict[str, Any]) -> str | None:
    """Return the quantization method of a model; None if it is not quantized."""
    if "quantization_config" not in described:
        return None
    return str((described["quantization_config"] or {}).get("quant_method", "in an unknown way"))


def _check_model_type(described: dict[str, Any], path: str, setting: str) -> None:
    """Refuse a model type that transformers does not implement."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = described.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in described:
        raise ConfigError(
            f"{setting}={path} is a model of Python code of its own (`auto_map` of its "
            "config.json), which is not run here. Take a model that transformers has a class of."
        )
    if kind is None:
        raise ConfigError(
            f"{setting}={path}: its config.json has no `model_type`, so nobody knows what model "
            "it is. Copy config.json from the model that this one was made from."
        )
    raise ConfigError(
        f"{setting}={path} is of the type `{kind}`, which transformers "
        f"{transformers.__version__} does not have. Install a newer one, or take another model."
        f"{suggest_name(str(kind), CONFIG_MAPPING.keys())}"
    )


def _check_causal(config: PretrainedConfig, path: str, setting: str) -> None:
    """Refuse a model that is not a causal language model."""
    from hybridrl.models.language_model import class_of

    classes = list(config.architectures or ())
    wrong = next(
        (name for name in classes if any(no in name for no in _NON_GENERATIVE_CLASSES)), None
    )
    if getattr(config, "is_encoder_decoder", False):
        why = f"an encoder-decoder ({config.model_type})"
    elif wrong is not None:
        why = f"`{wrong}` by its config.json"
    elif class_of(config) is None:
        why = f"of the type `{config.model_type}`, of which transformers has no language model"
    else:
        return
    raise ConfigError(
        f"{setting}={path} is {why}, and what is needed is a causal language model, which writes "
        "from left to right (`...ForCausalLM`). Take one of these."
    )

"""Whether a model folder can be loaded, found without loading anything."""

from __future__ import annotations

from pathlib import Path

from hybridrl.errors import ConfigError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_model(path: str, setting: str = "model.path") -> None:
    """Refuses a model folder that cannot be loaded, before anything starts.

    A path that is no folder here is taken for a hub name.

    Raises:
        ConfigError: naming `setting` and what the folder lacks.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise ConfigError(f"{setting}={path}: there is no such folder.")
        return
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{setting}={path} holds the adapters of a LoRA run, not a model. Multiply them in "
            "first: peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
            ".save_pretrained(new_folder), and copy the tokenizer's files."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting}={path} has no config.json, so it is not a Hugging Face model folder."
        )
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ConfigError(
            f"{setting}={path} has a config.json but no weights "
            f"({' or '.join(WEIGHT_FILES)}). Was the download cut short?"
        )

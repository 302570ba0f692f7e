"""Whether a tokenizer can speak to its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, path: str
) -> None:
    """Refuses a tokenizer without a vocabulary, with one larger than the model's, or with which no
    sample would ever end.

    Args:
        model: The policy's config.json.
        path: The policy's folder or hub name.

    Raises:
        ConfigError: naming the tokenizer, and what it lacks.
    """
    setting = "model.tokenizer" if config.model.tokenizer else "model.path"
    where = f"{setting}={config.model.tokenizer or path}"
    folder = Path(config.model.tokenizer or path)
    names = {"tokenizer.json", *(tokenizer.vocab_files_names or {}).values()}
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"{where} has no vocabulary of a tokenizer ({', '.join(sorted(names))}). Copy the "
            "tokenizer's files into that folder, or set model.tokenizer to where they are."
        )
    rows = model.get_text_config().vocab_size
    # A token for padding is often added to a tokenizer alone; nothing is padded here.
    beyond = {i: t for t, i in tokenizer.get_vocab().items() if i >= rows}
    beyond.pop(tokenizer.pad_token_id, None)
    if beyond:
        raise ConfigError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens and the model {rows}: it has "
            f"never seen {beyond[min(beyond)]!r} (token {min(beyond)}), nor has it a row for it. "
            "Take the model's own tokenizer, or enlarge the model with resize_token_embeddings."
        )
    if not end_tokens(path, tokenizer) and not config.rollout.stop:
        raise ConfigError(
            f"{where}: the tokenizer has no end-of-sequence token, so a model trained with it "
            "would never stop. Set `eos_token` in its tokenizer_config.json."
        )


def end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response, by the tokenizer and by the generation_config.json beside
    the model."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a folder without generation_config.json
        eos = None
    found = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    return tuple(sorted(found - {None}))

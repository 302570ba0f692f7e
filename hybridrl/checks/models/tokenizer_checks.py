"""Checks that tokenizer and model fit each other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config
from hybridrl.conversations.turn_ends import closing_token
from hybridrl.data.token_spelling import TokenSpelling
from hybridrl.errors import ConfigError
from hybridrl.trainers.role_spec import SCORING_WORKERS, RoleSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, path: str
) -> None:
    """Refuse a tokenizer without a vocabulary, with more tokens than the model has embeddings, or
    without an end token.

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
    if not find_end_tokens(path, tokenizer) and not config.rollout.stop:
        raise ConfigError(
            f"{where}: the tokenizer has no end-of-sequence token, so a model trained with it "
            "would never stop. Set `eos_token` in its tokenizer_config.json."
        )


def check_vocabularies(
    config: Config, roles: Mapping[str, RoleSpec], tokenizer: Any, path: str
) -> None:
    """Check that every model that scores, such as a reward model or a teacher, has the policy's
    vocabulary.

    Raises:
        ConfigError: if it has others.
    """
    from hybridrl.models.model_loading import load_tokenizer

    for role, spec in roles.items():
        own = spec.path(role, config)
        if spec.keywords.get("alignment") == "bytes":
            own = own or parse_role_model(config, role).further["tokenizer"]
            for one in (load_tokenizer(own), tokenizer):
                TokenSpelling(one)  # refuses tokens that are no pieces of text
            continue
        if not own or load_tokenizer(own).get_vocab() == tokenizer.get_vocab():
            continue
        scores = spec.worker in SCORING_WORKERS
        setting = f"{spec.worker}.model" if scores else f"models.{role}.path"
        cure = f", or a judge ({spec.worker}.judge.path), which reads text" if scores else ""
        if "top_k" in spec.keywords:  # a teacher
            cure = ", or set distillation.alignment=bytes"
        raise ConfigError(
            f"{setting}={own} has another vocabulary than the policy's tokenizer ({path}): it "
            f"would read other words than were written. Take a model of the same family{cure}."
        )


def find_end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: those that config.json, generation_config.json and the
    tokenizer name, and the one that closes an assistant's turn in the chat template."""
    closing = closing_token(tokenizer)
    return tuple(sorted(_named(path, tokenizer) | ({closing} if closing is not None else set())))


def remark_on_ends(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sentence if no file names the token that closes a turn as an end token; else an
    empty text."""
    closing = closing_token(tokenizer)
    if closing is None or closing in _named(path, tokenizer):
        return ""
    return (
        f"The chat template closes the assistant's turns with "
        f"`{tokenizer.convert_ids_to_tokens(closing)}` (token {closing}), which is no "
        "`eos_token_id` in config.json or generation_config.json and not the tokenizer's: "
        "responses end with it, too."
    )


def _named(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    from transformers import GenerationConfig

    from hybridrl.models.model_loading import load_model_config

    config = load_model_config(path)
    places = [config, config.get_text_config(), tokenizer]
    with contextlib.suppress(OSError):  # a folder without generation_config.json
        places.append(GenerationConfig.from_pretrained(path))
    found: set[int] = set()
    for place in places:
        named: int | list[int] | None = getattr(place, "eos_token_id", None)
        found |= {named} if isinstance(named, int) else set(named or ())
    return found

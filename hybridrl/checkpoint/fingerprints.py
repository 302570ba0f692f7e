"""Whether a checkpoint was made with the model and the tokenizer of this job: found out before any
worker is built, from a description that the checkpoint keeps."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError
from hybridrl.system.locations import Location

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MADE_WITH = "made_with.json"
_SAME_TENSORS = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Of a model's config.json, what neither its parameters nor its outputs depend on."""


def made_with(model: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a job is made with, as plain data.

    Args:
        model: Its config.json.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kept = {name: value for name, value in model.items() if name not in _SAME_TENSORS}
    return {
        "model": json.loads(json.dumps(kept, default=str)),
        "tokenizer": {
            "tokens": len(vocabulary),
            "crc32": zlib.crc32(repr(vocabulary).encode()),
        },
    }


def check_made_with(folder: Location, now: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another model or tokenizer.

    Args:
        folder: The checkpoint's.
        now: Of this job.

    Raises:
        ConfigError: names what differs.
    """
    try:
        before = json.loads((folder / MADE_WITH).read_text(encoding="utf-8"))
        old, new = before["model"], now["model"]
        tokens, crc32 = before["tokenizer"]["tokens"], before["tokenizer"]["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / MADE_WITH} could not be read ({type(error).__name__}: {error}). Resume "
            "from another step."
        ) from error
    cure = "Take the model of that run, or begin a new run from its weights: model.path="
    if keys := sorted(key for key in {**old, **new} if old.get(key) != new.get(key)):
        lines = "; ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys)
        raise ConfigError(f"{folder} is the state of another model ({lines}). {cure}{folder}.")
    if (tokens, crc32) != (now["tokenizer"]["tokens"], now["tokenizer"]["crc32"]):
        other = now["tokenizer"]["tokens"]
        sizes = f"{tokens} tokens, this job's {other}" if tokens != other else "other tokens"
        raise ConfigError(
            f"{folder} was made with another tokenizer (its vocabulary has {sizes}), so its model "
            "would read other texts than it has learned. Set model.tokenizer to the one of that "
            "run."
        )

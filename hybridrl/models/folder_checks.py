"""Checks that a folder holds the model that its config.json describes, without reading a weight.

transformers makes up what a folder lacks, with a table in the log; a model that is trained, or that
scores, must not go on with random numbers.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.utils import logging

from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.errors import ConfigError
from hybridrl.models.language_model import build_meta_language_model, read_language_model

SCALAR_HEAD_PREFIX = "score."
"""What the name of a scalar head's parameters begins with."""
_LFS_POINTER = b"version https://git-lfs"
_PATTERNS = ("*.safetensors", "*.bin")


def check_weight_files(path: str, setting: str) -> None:
    """Check the beginnings and lengths of the files of weights.

    Args:
        setting: Names the folder, for messages.

    Raises:
        ConfigError: for a file that is cut short or is a pointer of git-LFS; names it.
    """
    folder = Path(path)
    for file in sorted(f for pattern in _PATTERNS for f in folder.glob(pattern)):
        with file.open("rb") as stream:
            begins = stream.read(len(_LFS_POINTER))
        if begins == _LFS_POINTER:
            raise ConfigError(
                f"{setting}={path}: {file.name} is a pointer of git-LFS, not the weights. Fetch "
                "them with `git lfs pull` in that folder, or download it with `hf download`."
            )
        is_pickle = begins.startswith(b"\x80")
        if file.suffix == ".bin" and not (is_pickle or zipfile.is_zipfile(file)):
            raise ConfigError(
                f"{setting}={path}: {file.name} is no whole file of torch.save. Was the download "
                "cut short? Download it again."
            )
    TensorReader(folder)  # whose headers and lengths must agree


def check_model_tensors(
    path: str, setting: str, config: PretrainedConfig, *, scalar: bool, needs_head: bool
) -> None:
    """Compare names and shapes in the headers of a folder's files with its config.json.

    Args:
        setting: Names the folder, for messages.
        config: Of the model.
        scalar: It is to end in one number, not in a distribution over tokens.
        needs_head: Of a scalar model: the files must have that head.

    Raises:
        ConfigError: for tensors that are missing or of another shape; names them.
    """
    described = copy.deepcopy(config)
    if scalar:
        described.num_labels = 1
    try:
        build_meta_language_model(described, scalar=scalar)
    except Exception as error:
        raise ConfigError(
            f"{setting}={path}: transformers {transformers.__version__} cannot build a model of "
            f"the type `{config.model_type}` from its config.json ({_reason(error)}). If it names "
            "a package, install it; else take another model, or a version of transformers that "
            "knows this one."
        ) from error
    try:
        with silence_transformers():
            model, report = read_language_model(
                path,
                described,
                scalar=scalar,
                device_map="meta",
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # libraries raise many kinds
        raise ConfigError(
            f"{setting}={path}: its files could not be read as the model that its config.json "
            f"describes ({_reason(error)}). Copy, download or save it again."
        ) from error
    if scalar and not hasattr(model, SCALAR_HEAD_PREFIX[:-1]):
        raise ConfigError(
            f"{setting}={path} is of the type `{config.model_type}`, whose scalar head is not "
            f"`{SCALAR_HEAD_PREFIX[:-1]}`, and so no critic or reward model. Take a decoder such "
            "as Qwen or Llama, with one label."
        )
    check_loaded_tensors(report, f"{setting}={path}", needs_head=needs_head or not scalar)


def check_loaded_tensors(report: Mapping[str, Any], who: str, *, needs_head: bool) -> None:
    """Refuse a model that has parameters which were not in its files.

    Args:
        report: What transformers says of loading it.
        who: Begins the sentence.
        needs_head: Also a scalar head must be there.

    Raises:
        ConfigError: names one of them, and their number.
    """
    if report["mismatched_keys"]:
        name, stored, wanted = sorted(report["mismatched_keys"])[0]
        raise ConfigError(
            f"{who}: `{name}` has the shape {list(stored)} in its files and {list(wanted)} by its "
            f"config.json ({len(report['mismatched_keys'])} tensors differ). They are not of one "
            "model: take config.json and weights from the same place."
        )
    missing = sorted(report["missing_keys"])
    head = [name for name in missing if name.startswith(SCALAR_HEAD_PREFIX)]
    body = [name for name in missing if name not in head]
    if body:
        others = sorted(report["unexpected_keys"])
        instead = f" They have `{others[0]}`, which the model has not." if others else ""
        raise ConfigError(
            f"{who}: its files lack {len(body)} of the tensors that its config.json describes, "
            f"among them `{body[0]}`.{instead} Random numbers would stand in their place. Copy, "
            "download or save the model again, with the config.json that belongs to it."
        )
    if head and needs_head:
        raise ConfigError(
            f"{who} is a model without a scalar head (`{head[0]}`), so it would score everything "
            "0. Take a sequence-classification folder with one label: trainer.name=reward_model "
            "makes one."
        )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' table of missing weights inside the block: errors tell instead."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)

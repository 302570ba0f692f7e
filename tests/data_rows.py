"""Rows of files, as a job reads them in one go, and tokenizers to read them with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.data_files import find_rows, read_found_rows
from hybridrl.data.refused_rows import RefusedRows

CLOSING = (
    "{% for m in messages %}{{ m.role[0] }}-{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}a-{% endif %}"
)
"""A template that closes turns with the end token and a space, as ChatML does with a line break."""


def with_template(template: str = CLOSING) -> PreTrainedTokenizerBase:
    tokenizer = build_character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def write_rows(file: Path, rows: Iterable[Any]) -> str:
    """Write JSON lines; a text stands in the file as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines))
    return str(file)


def read_rows(
    path: str,
    split: str | None = None,
    *,
    required: Mapping[str, str] | None = None,
    named: Mapping[str, bool] | None = None,
    refused: RefusedRows | None = None,
) -> pa.Table:
    refused = refused or RefusedRows()
    found = find_rows(path, split, refused.origin)
    return read_found_rows(found, path, required or {}, named or {}, refused)

"""Tokens as the texts that they stand for, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Tokens, of a byte each, that may make one character."""


def tokenizer_of(run: Path, settings: dict[str, Any]) -> Tokenizer | None:
    """That of a run's model, from a file on this machine; None: there is none."""
    from tokenizers import Tokenizer

    model = settings.get("model") or {}
    named = [model.get("tokenizer"), model.get("path")] if isinstance(model, dict) else []
    folders = [run / "model", run / "initial_model", *(Path(str(one)) for one in named if one)]
    for folder in folders:
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # its errors have no class of their own
                continue
    return None


def texts(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character that is spread over several is added by its
    last. Without a tokenizer the numbers of the tokens.
    """
    if tokenizer is None:
        return [f"{token} " for token in ids]
    found: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        # Some tokenizers leave out the space at the beginning of a text: the token before is kept.
        start = tokenizer.decode(before, skip_special_tokens=False)
        whole = tokenizer.decode([*before, *pending], skip_special_tokens=False)
        if whole.endswith(_UNFINISHED) and len(pending) < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(whole[len(start) :] if whole.startswith(start) else whole)
        before, pending = [token], []
    if pending:
        found[-1] = _UNFINISHED
    return found

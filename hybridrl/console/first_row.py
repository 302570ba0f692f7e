"""The first row of the data as the model reads it, with the tokens to learn marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridrl.batch.batch import Batch
from hybridrl.console.safe_text import sanitize_line

SHOWN_CELLS = 600
"""Longest text on the console."""
PIECE_CELLS = 200
"""Longest stretch of it with or without loss."""


class TextPiece(NamedTuple):
    """Tokens next to each other that are all learned, or all read only."""

    text: str
    is_learned: bool


class ShownRow(NamedTuple):
    """Attributes:
    name: `prompt`, `example`, or `pair (chosen)` and `pair (rejected)`.
    """

    name: str
    pieces: list[TextPiece]

    def figures(self) -> dict[str, Any]:
        """The row in full, as `data-report.json` has it."""
        return {"name": self.name, "pieces": [one._asdict() for one in self.pieces]}

    def sentence(self) -> str:
        """The row on one line of a console, its middle left out if it is long."""
        marked = "".join(
            f"⟦{text}⟧" if is_learned else text
            for text, is_learned in (
                (sanitize_line(text, PIECE_CELLS), x) for text, x in self.pieces
            )
        )
        learns = any(one.is_learned for one in self.pieces)
        marks = ", the tokens to learn between ⟦ and ⟧" if learns else ""
        return (
            f"First {self.name} as the model reads it{marks}: {sanitize_line(marked, SHOWN_CELLS)}"
        )


def show_first_row(rows: Batch, tokenizer: Any) -> list[ShownRow]:
    """Return the first row of tokenized prompts or examples, or both sides of the first pair."""
    if not len(rows):
        return []
    first = rows.take([0])

    def ids(column: str) -> list[int]:
        return list(first.ragged(column).rows()[0].tolist())

    prompt = ids("prompt_ids")
    if "chosen_ids" in rows.columns:
        sides = {f"pair ({name})": ids(f"{name}_ids") for name in ("chosen", "rejected")}
        masks = {name: [1] * len(side) for name, side in sides.items()}
    elif "response_ids" in rows.columns:
        sides, masks = {"example": ids("response_ids")}, {"example": ids("response_mask")}
    else:
        sides, masks = {"prompt": []}, {"prompt": []}
    return [
        ShownRow(name, _pieces([*prompt, *side], [0] * len(prompt) + masks[name], tokenizer))
        for name, side in sides.items()
    ]


def _pieces(ids: Sequence[int], mask: Sequence[int], tokenizer: Any) -> list[TextPiece]:
    """Each piece is what it adds to the text before it: alone, it may lose a space."""
    pieces, end, before = [], 0, ""
    for is_learned, stretch in itertools.groupby(mask):
        end += len(list(stretch))
        text = tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces.append(TextPiece(text[len(before) :], bool(is_learned)))
        before = text
    return pieces

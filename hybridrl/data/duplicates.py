"""Duplicates in the data: repeated and nearly repeated prompts, and evaluation prompts that are
also trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch

HELD_OUT = "held_out"
NEAR_ROWS = 100_000
"""Near duplicates are looked for among so many rows at most."""
NEAR_CHARACTERS = 25_000_000
"""And in so many characters."""
NGRAM = 12
"""Characters of the pieces that texts are compared by."""
SIMILAR = 0.8
"""Texts are nearly the same from this share of equal pieces on."""
LEAST_PIECES = 8
"""A text with fewer pieces is too short to be nearly another one."""
COMMON = 50
"""A piece that more texts have is of a template, and says nothing of a text."""
SKETCH = 2_000_000
"""About so many pieces are compared; of more, those with the smallest fingerprints."""
_NO_WORD = str.maketrans(dict.fromkeys("!\"#$%&'(),:;?@[\\]_`{|}~", " "))
_BASE = 0x100000001B3
_NUMBER = re.compile(r"\d+")


class DataReport(NamedTuple):
    """Duplicates found in the data, as figures for `data-report.json` and as sentences for the
    user. As written to `data-report.json`. remarks: Sentences for the user; none where nothing is
    repeated."""

    figures: dict[str, Any]
    remarks: list[str]


class _Found(NamedTuple):
    """Pairs of duplicate rows, the later row first."""

    exact: list[tuple[int, int]]
    near: list[tuple[int, int]] | None


def report_on(
    training: Batch, kept: Mapping[str, Batch], tokenizer: Any, *, repeats: bool = True
) -> DataReport:
    """Count prompts that repeat earlier ones, and evaluation prompts that are also trained on.

    Two prompts are the same if they are when case, spaces and punctuation are left aside. They are
    nearly the same if they have the same numbers and, of the pieces of `NGRAM` characters that are
    no template's, `SIMILAR` of the shorter one's are in the other (containment of sketches, Broder
    1997). A row is compared with the first row that has a piece, so this takes no longer than
    sorting the pieces.

    Args:
        training: Tokenized.
        kept: Rows to evaluate on, by name: `held_out`, or the setting of a set.
        tokenizer: Decodes prompts of rows that have no text.
        repeats: Whether a prompt that comes twice is worth a remark: with two answers it is not.
    """
    texts = _texts(training, tokenizer)
    learned = len(texts)
    places = {}
    for name, rows in kept.items():
        begin = len(texts)
        texts += _texts(rows, tokenizer)
        places[name] = range(begin, len(texts))
    found = _repeats(texts)
    inside = _among(found, lambda later, first: later < learned)
    figures: dict[str, Any] = {"training": {"rows": learned, **_figures(inside, texts)}}
    remarks = []
    if repeats and (inside.exact or inside.near):
        differ = _with_other_answers(training, inside.exact)
        remarks.append(
            f"{_said(inside)} of the {learned} prompts repeat earlier ones"
            + (f", {differ} of them with another answer" if differ else "")
            + f": {_shown(inside, texts)}."
        )
    for name, mine in places.items():
        across = _among(found, lambda later, first, mine=mine: first < learned and later in mine)
        figures[name] = {"rows": len(mine), **_figures(across, texts)}
        if across.exact or across.near:
            called = "held-out prompts" if name == HELD_OUT else f"prompts of {name}"
            remarks.append(
                f"{_said(across)} of the {len(mine)} {called} are also learned from, so the "
                f"evaluation says too much: {_shown(across, texts)}. Leave them out of one of both."
            )
    if found.near is None:
        figures["near_skipped"] = f"more than {NEAR_ROWS} rows or {NEAR_CHARACTERS} characters"
        remarks.append(
            f"Of {len(texts)} prompts it was not looked for near duplicates: that takes too long "
            f"from {NEAR_ROWS} rows, or {NEAR_CHARACTERS} characters, on."
        )
    return DataReport(figures, remarks)


def _texts(rows: Batch, tokenizer: Any) -> list[str]:
    if "prompt" in rows.columns:
        return list(rows["prompt"])
    ids = rows.ragged("prompt_ids").rows()
    return list(tokenizer.batch_decode([row.tolist() for row in ids])) if len(rows) else []


def _repeats(texts: Sequence[str]) -> _Found:
    plain = [" ".join(text.lower().translate(_NO_WORD).split()) for text in texts]
    first: dict[str, int] = {}
    exact = [
        (place, earlier)
        for place, text in enumerate(plain)
        if (earlier := first.setdefault(text, place)) != place
    ]
    if len(plain) > NEAR_ROWS or sum(map(len, plain)) > NEAR_CHARACTERS:
        return _Found(exact, None)
    different = np.array(sorted(first.values()), np.int64)
    near = _near([plain[place] for place in different.tolist()])
    return _Found(exact, [(int(different[a]), int(different[b])) for a, b in near])


def _near(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of texts that are nearly the same, the later one first."""
    pieces, owners = _fingerprints(texts)
    if not len(pieces):
        return []
    begins = np.flatnonzero(np.r_[True, pieces[1:] != pieces[:-1]])
    sizes = np.diff(np.r_[begins, len(pieces)])
    first = np.repeat(owners[begins], sizes)  # the first text that has the piece
    telling = np.repeat(sizes <= COMMON, sizes)
    counts = np.bincount(owners[telling], minlength=len(texts))
    meet = telling & (first != owners)
    pairs, shared = np.unique(owners[meet] * len(texts) + first[meet], return_counts=True)
    later_ones, earlier_ones = np.divmod(pairs, len(texts))
    shorter = np.minimum(counts[later_ones], counts[earlier_ones])
    alike = (shared >= SIMILAR * shorter) & (shorter >= LEAST_PIECES)
    found: dict[int, int] = {}
    for later, earlier in zip(
        later_ones[alike].tolist(), earlier_ones[alike].tolist(), strict=True
    ):
        if _NUMBER.findall(texts[later]) == _NUMBER.findall(texts[earlier]):
            found.setdefault(later, earlier)
    return list(found.items())


def _fingerprints(
    texts: Sequence[str],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return the hash of each distinct n-gram of each text, sorted, and the index of its text."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)
    whole = np.frombuffer(b"".join(encoded), np.uint8)
    if (lengths < NGRAM).all():
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    number = len(whole) - NGRAM + 1
    hashes = whole.astype(np.uint64)  # a polynomial of the bytes, which wraps around
    of_four = hashes
    for length in (1, 2, 4):  # becomes that of twice as many bytes
        of_four = hashes
        hashes = hashes[:-length] * np.uint64(pow(_BASE, length, 2**64)) + hashes[length:]
    hashes = hashes[:-4] * np.uint64(pow(_BASE, 4, 2**64)) + of_four[8:]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    kept = hashes <= np.uint64(min(1.0, SKETCH / number) * (2**64 - 2**12))
    ends = np.cumsum(lengths)
    for place in range(1, NGRAM):  # pieces that reach into the next text
        over = ends[:-1] - place
        kept[over[(over >= 0) & (over < number)]] = False
    chosen = np.flatnonzero(kept)
    if not len(chosen):
        return hashes[:0], chosen
    owners = np.searchsorted(ends, chosen, side="right")
    order = np.argsort(hashes[chosen], kind="stable")  # so that owners are in order, too
    pieces, owners = hashes[chosen][order], owners[order]
    new = np.r_[True, (pieces[1:] != pieces[:-1]) | (owners[1:] != owners[:-1])]
    return pieces[new], owners[new]


def _among(found: _Found, wanted: Any) -> _Found:
    near = None if found.near is None else [pair for pair in found.near if wanted(*pair)]
    return _Found([pair for pair in found.exact if wanted(*pair)], near)


def _figures(found: _Found, texts: Sequence[str]) -> dict[str, Any]:
    kinds = {"exact": found.exact, "near": found.near}
    return {
        f"{name}_duplicates": None if pairs is None else len(pairs) for name, pairs in kinds.items()
    } | {"examples": [[texts[a], texts[b]] for a, b in _examples(found)]}


def _examples(found: _Found) -> list[tuple[int, int]]:
    """Return two pairs, one exact and one near duplicate if both exist."""
    return [*found.exact[:1], *(found.near or [])[:1], *found.exact[1:2]][:2]


def _said(found: _Found) -> str:
    near = len(found.near or ())
    if found.exact and near:
        return f"{len(found.exact)} (and nearly, {near})"
    return f"{len(found.exact)}" if found.exact else f"{near} (nearly)"


def _shown(found: _Found, texts: Sequence[str]) -> str:
    shown = [texts[later] for later, _ in _examples(found)]
    return "; ".join(repr(text if len(text) <= 60 else f"{text[:60]}...") for text in shown)


def _with_other_answers(rows: Batch, pairs: Sequence[tuple[int, int]]) -> int:
    if "answer" not in rows.columns or not pairs:
        return 0
    answers = rows["answer"]
    return sum(answers[later] != answers[first] for later, first in pairs)

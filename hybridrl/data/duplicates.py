"""Duplicates in the data: repeated and nearly repeated prompts, and evaluation prompts that are
also trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.data.row_keys import (
    compute_text_keys,
    hash_texts,
    normalize_text,
    read_prompt_texts,
)

HELD_OUT_NAME = "held_out"
MAX_NEAR_ROWS = 100_000
"""Near duplicates are looked for among so many rows at most."""
MAX_NEAR_CHARACTERS = 25_000_000
"""And in so many characters."""
NGRAM_CHARACTERS = 12
"""Characters of the pieces that texts are compared by."""
MIN_CONTAINMENT = 0.8
"""Texts are nearly the same from this share of equal pieces on."""
MIN_NGRAMS = 8
"""A text with fewer pieces is too short to be nearly another one."""
MAX_NGRAM_TEXTS = 50
"""A piece that more texts have is of a template, and says nothing of a text."""
MAX_SKETCH_NGRAMS = 2_000_000
"""About so many pieces are compared; of more, those with the smallest fingerprints."""
_BASE = np.uint64(0x100000001B3)
_NUMBER = re.compile(r"\d+")


class DuplicateReport(NamedTuple):
    """Duplicates found in the data, as figures for `data-report.json` and as sentences for the
    user."""

    figures: dict[str, Any]
    remarks: list[str]


class _DuplicatePairs(NamedTuple):
    """Pairs of duplicate rows, the later row first."""

    exact: list[tuple[int, int]]
    near: list[tuple[int, int]] | None


def find_duplicates(
    training: Batch, kept: Mapping[str, Batch], tokenizer: Any, *, repeats: bool = True
) -> DuplicateReport:
    """Count prompts that repeat earlier ones, and evaluation prompts that are also trained on.

    Two prompts are the same if they are when case, spaces and punctuation are left aside. They are
    nearly the same if they have the same numbers and, of the pieces of `NGRAM_CHARACTERS`
    characters that are no template's, `MIN_CONTAINMENT` of the shorter one's are in the other
    (containment of sketches, Broder 1997). A row is compared with the first row that has a piece,
    so this takes no longer than sorting the pieces.

    Args:
        training: Tokenized.
        kept: Rows to evaluate on, by name: `held_out`, or the setting of a set.
        tokenizer: Decodes prompts of rows that have no text.
        repeats: Whether a prompt that comes twice is worth a remark: with two answers it is not.
    """
    batches = [training, *kept.values()]
    ends = np.cumsum([len(rows) for rows in batches]).tolist()
    places = {name: range(a, b) for name, (a, b) in zip(kept, pairwise(ends), strict=True)}
    learned, texts = len(training), _PromptTexts(batches, tokenizer)
    found = _find_pairs(batches, tokenizer)
    inside = _filter_pairs(found, lambda later, first: later < learned)
    figures: dict[str, Any] = {"training": {"rows": learned, **_format_figures(inside, texts)}}
    remarks = []
    if repeats and (inside.exact or inside.near):
        differ = _count_other_answers(training, inside.exact)
        remarks.append(
            f"{_format_counts(inside)} of the {learned} prompts repeat earlier ones"
            + (f", {differ} of them with another answer" if differ else "")
            + f": {_format_examples(inside, texts)}."
        )
    for name, mine in places.items():
        across = _filter_pairs(
            found, lambda later, first, mine=mine: first < learned and later in mine
        )
        figures[name] = {"rows": len(mine), **_format_figures(across, texts)}
        if across.exact or across.near:
            called = "held-out prompts" if name == HELD_OUT_NAME else f"prompts of {name}"
            remarks.append(
                f"{_format_counts(across)} of the {len(mine)} {called} are also learned from, so "
                f"the evaluation says too much: {_format_examples(across, texts)}. Leave them out "
                "of one of both."
            )
    if found.near is None:
        figures["near_skipped"] = (
            f"more than {MAX_NEAR_ROWS} rows or {MAX_NEAR_CHARACTERS} characters"
        )
        remarks.append(
            f"Of {ends[-1]} prompts it was not looked for near duplicates: that takes too long "
            f"from {MAX_NEAR_ROWS} rows, or {MAX_NEAR_CHARACTERS} characters, on."
        )
    return DuplicateReport(figures, remarks)


class _PromptTexts:
    """The prompts of several batches as texts, each read when it is asked for."""

    def __init__(self, batches: Sequence[Batch], tokenizer: Any) -> None:
        self._batches, self._tokenizer = batches, tokenizer
        self._begins = np.cumsum([0, *map(len, batches)])

    def __getitem__(self, place: int) -> str:
        number = int(np.searchsorted(self._begins, place, side="right")) - 1
        row = self._batches[number].take([place - int(self._begins[number])])
        return read_prompt_texts(row, self._tokenizer)[0]


def _find_pairs(batches: Sequence[Batch], tokenizer: Any) -> _DuplicatePairs:
    tokens = sum(int(b.lengths("prompt_ids").sum()) for b in batches if "prompt_ids" in b)
    if tokens > MAX_NEAR_CHARACTERS or sum(map(len, batches)) > MAX_NEAR_ROWS:
        keys = np.concatenate([compute_text_keys(rows, tokenizer) for rows in batches])
        return _DuplicatePairs(_find_equal_keys(keys), None)
    plain = [
        normalize_text(text) for rows in batches for text in read_prompt_texts(rows, tokenizer)
    ]
    exact = _find_equal_keys(hash_texts(plain))
    if sum(map(len, plain)) > MAX_NEAR_CHARACTERS:
        return _DuplicatePairs(exact, None)
    repeated = {place for place, _ in exact}
    different = [place for place in range(len(plain)) if place not in repeated]
    near = _find_near_pairs([plain[place] for place in different])
    return _DuplicatePairs(exact, [(different[a], different[b]) for a, b in near])


def _find_equal_keys(keys: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the rows whose key an earlier row has, each with the first such row."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    earlier = first[inverse]
    later = np.flatnonzero(earlier != np.arange(len(keys)))
    return list(zip(later.tolist(), earlier[later].tolist(), strict=True))


def _find_near_pairs(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of texts that are nearly the same, the later one first."""
    pieces, owners = _ngram_fingerprints(texts)
    if not len(pieces):
        return []
    begins = np.flatnonzero(np.r_[True, pieces[1:] != pieces[:-1]])
    sizes = np.diff(np.r_[begins, len(pieces)])
    first = np.repeat(owners[begins], sizes)  # the first text that has the piece
    telling = np.repeat(sizes <= MAX_NGRAM_TEXTS, sizes)
    counts = np.bincount(owners[telling], minlength=len(texts))
    meet = telling & (first != owners)
    pairs, shared = np.unique(owners[meet] * len(texts) + first[meet], return_counts=True)
    later_ones, earlier_ones = np.divmod(pairs, len(texts))
    shorter = np.minimum(counts[later_ones], counts[earlier_ones])
    alike = (shared >= MIN_CONTAINMENT * shorter) & (shorter >= MIN_NGRAMS)
    found: dict[int, int] = {}
    for later, earlier in zip(
        later_ones[alike].tolist(), earlier_ones[alike].tolist(), strict=True
    ):
        if _NUMBER.findall(texts[later]) == _NUMBER.findall(texts[earlier]):
            found.setdefault(later, earlier)
    return list(found.items())


def _ngram_fingerprints(
    texts: Sequence[str],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return the hash of each distinct n-gram of each text, sorted, and the index of its text."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)
    whole = np.frombuffer(b"".join(encoded), np.uint8)
    if (lengths < NGRAM_CHARACTERS).all():
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    number = len(whole) - NGRAM_CHARACTERS + 1
    hashes = np.zeros(number, np.uint64)  # a polynomial of the bytes, which wraps around
    for place in range(NGRAM_CHARACTERS):
        hashes = hashes * _BASE + whole[place : place + number]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    kept = hashes <= np.uint64(min(1.0, MAX_SKETCH_NGRAMS / number) * (2**64 - 2**12))
    ends = np.cumsum(lengths)
    for place in range(1, NGRAM_CHARACTERS):  # pieces that reach into the next text
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


def _filter_pairs(found: _DuplicatePairs, wanted: Any) -> _DuplicatePairs:
    near = None if found.near is None else [pair for pair in found.near if wanted(*pair)]
    return _DuplicatePairs([pair for pair in found.exact if wanted(*pair)], near)


def _format_figures(found: _DuplicatePairs, texts: _PromptTexts) -> dict[str, Any]:
    kinds = {"exact": found.exact, "near": found.near}
    return {
        f"{name}_duplicates": None if pairs is None else len(pairs) for name, pairs in kinds.items()
    } | {"examples": [[texts[a], texts[b]] for a, b in _choose_examples(found)]}


def _choose_examples(found: _DuplicatePairs) -> list[tuple[int, int]]:
    """Return two pairs, one exact and one near duplicate if both exist."""
    return [*found.exact[:1], *(found.near or [])[:1], *found.exact[1:2]][:2]


def _format_counts(found: _DuplicatePairs) -> str:
    near = len(found.near or ())
    if found.exact and near:
        return f"{len(found.exact)} (and nearly, {near})"
    return f"{len(found.exact)}" if found.exact else f"{near} (nearly)"


def _format_examples(found: _DuplicatePairs, texts: _PromptTexts) -> str:
    shown = [texts[later] for later, _ in _choose_examples(found)]
    return "; ".join(repr(text if len(text) <= 60 else f"{text[:60]}...") for text in shown)


def _count_other_answers(rows: Batch, pairs: Sequence[tuple[int, int]]) -> int:
    if "answer" not in rows.columns or not pairs:
        return 0
    answers = rows["answer"]
    return sum(answers[later] != answers[first] for later, first in pairs)

"""The samples of a run for the report's sample browser: whole groups of some steps, within a byte
limit."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.batch.batch import LIBRARY_PREFIXES
from hybridrl.config.changed import read_setting
from hybridrl.run_files.run_paths import INITIAL_MODEL, MODEL, SAMPLES, TOKENS
from hybridrl.run_files.run_reader import RunReader, read_table

if TYPE_CHECKING:
    from pyarrow import Table
    from tokenizers import Tokenizer

_MAX_BYTES = 2_400_000
"""Of all samples, as they stand in the page."""
_MAX_FILES = 12
_MAX_TEXT_LENGTH = 6_000
"""Of a text, in characters; of a longer one the beginning and the end are kept."""
_MAX_TOKENS = 2_000
"""Of a sample, that are coloured."""
_FILE = re.compile(r"(?:eval-(?P<set>[\w-]+)-)?step-(?P<step>\d+)\.parquet")
_TEXT_COLUMNS = ("prompt", "answer", "response", "finish_reason", "extracted")
_TOKEN_COLUMNS = (
    "rollout_log_probs",
    "log_probs",
    "ref_log_probs",
    "advantages",
    "values",
    "returns",
)


class SampleFile(NamedTuple):
    """A file of samples, of a training step or of an evaluation set at a step."""

    file: Path
    step: int
    set: str

    @property
    def label(self) -> str:
        return f"{self.set}, step {self.step}" if self.set else f"step {self.step}"


def build_sample_browser(run: RunReader, most_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Build the data of the sample browser: `sources`, `build_sample_browser`, and a `note` on what
    was left out."""
    everything = _list_sample_files(run)
    chosen = _choose_files(everything)
    tokenizer = tokenizer_of(run.path, run.settings()) if chosen else None
    shown: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    unread, room = [], most_bytes
    for number, source in enumerate(chosen):
        share = room // (len(chosen) - number)
        try:
            rows, total = _read_complete_groups(source, tokenizer, share)
        except Exception as error:  # of pyarrow: a file may be cut short, or none of ours
            unread.append(f"{source.file.name}: {str(error).splitlines()[0][:120]}")
            continue
        for size, row in rows:
            room -= size
            shown.append({"source": len(sources), **row})
        sources.append(
            {"label": source.label, "step": source.step, "set": source.set, "samples": total}
        )
    return {
        "sources": sources,
        "samples": shown,
        "note": _describe_omissions(everything, sources, shown),
        "unread": unread,
    }


def _list_sample_files(run: RunReader) -> list[SampleFile]:
    """List a run's sample files in the order of steps."""
    found = []
    for file in run.files(SAMPLES, "*.parquet"):
        if named := _FILE.fullmatch(file.name):
            found.append(SampleFile(file, int(named["step"]), named["set"] or ""))
    return sorted(found, key=lambda one: (one.step, one.set))


def _choose_files(everything: Sequence[SampleFile]) -> list[SampleFile]:
    """Choose training files evenly, with the first and the last, and the last file of each
    evaluation set."""
    training = [one for one in everything if not one.set]
    if len(training) > _MAX_FILES:
        last = len(training) - 1
        places = {round(part * last / (_MAX_FILES - 1)) for part in range(_MAX_FILES)}
        training = [training[place] for place in sorted(places)]
    newest = {one.set: one for one in everything if one.set}
    return [*training, *newest.values()]


def _read_complete_groups(
    source: SampleFile, tokenizer: Tokenizer | None, room: int
) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Read whole groups with their sizes in bytes until the room is used up; return them and the
    total number of samples.

    Of the first group, if it has none, as many samples as fit without their tokens, and one at
    least.
    """
    table = read_table(source.file)
    tokens = _read_token_table(source)
    found: list[tuple[int, dict[str, Any]]] = []
    left = room
    name = next((one for one in ("group_id", "row") if one in table.column_names), None)
    numbers = table.column(name).to_pylist() if name else range(table.num_rows)
    first = 0
    for _, neighbours in itertools.groupby(numbers):
        count = len(list(neighbours))
        plain = [_build_sample(row) for row in table.slice(first, count).to_pylist()]
        group = []
        for index, shown in enumerate(plain, first):
            if tokens is not None and index < tokens.num_rows:
                of_tokens = tokens.slice(index, 1).to_pylist()[0]
                shown = shown | _build_tokens(of_tokens, tokenizer)
            group.append((_json_size(shown), shown))
        size = sum(each for each, _ in group)
        if size > left:
            return found or _select_fitting(plain, left), table.num_rows
        found += group
        left -= size
        first += count
    return found, table.num_rows


def _select_fitting(samples: list[dict[str, Any]], room: int) -> list[tuple[int, dict[str, Any]]]:
    found = [(_json_size(sample), sample) for sample in samples]
    fitting = sum(end <= room for end in itertools.accumulate(size for size, _ in found))
    return found[: max(1, fitting)]


def _json_size(sample: dict[str, Any]) -> int:
    return len(json.dumps(sample, ensure_ascii=False).encode())


def _read_token_table(source: SampleFile) -> Table | None:
    """Read the table of the tokens of the first samples of a step, which `write_samples` made."""
    file = source.file.parent.parent / TOKENS / source.file.name
    return read_table(file) if not source.set and file.is_file() else None


def _build_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "group": row.get("group_id", row.get("row")),
        **{
            name: _shorten_text(row[name])
            for name in _TEXT_COLUMNS
            if row.get(name) not in (None, "")
        },
        "reward": _round_number(row.get("scores", row.get("score"))),
        "cost": _round_number(row.get("costs")),
        "correct": row.get("correct"),
        "length": row.get("tokens"),
        "advantage": _round_number(row.get("advantage")),
        "version": row.get("policy_version"),
        "episode": row.get("episode"),
        "turns": row.get("turns"),
        "turn_rewards": [_round_number(one) for one in row.get("turn_rewards") or []] or None,
        "parts": {
            name.partition("/")[2]: _round_number(value)
            for name, value in row.items()
            if name.startswith(LIBRARY_PREFIXES)
        }
        or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _build_tokens(row: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = list(row.get("response_ids") or [])[:_MAX_TOKENS]
    if not ids:
        return {}
    found: dict[str, Any] = {"text": decode_tokens(tokenizer, ids)}
    for name in ("response_mask", "turn"):
        if row.get(name):
            found[name] = [int(one) for one in row[name][: len(ids)]]
    for name in _TOKEN_COLUMNS:
        if row.get(name):
            found[name] = [_round_number(one) for one in row[name][: len(ids)]]
    cut = len(row["response_ids"]) - len(ids)
    return {"tokens": found, **({"tokens_left_out": cut} if cut else {})}


def _shorten_text(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    if len(text) <= _MAX_TEXT_LENGTH:
        return text
    half = _MAX_TEXT_LENGTH // 2
    return (
        f"{text[:half]}\n… {len(text) - _MAX_TEXT_LENGTH:,} characters left out …\n{text[-half:]}"
    )


def _round_number(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def _describe_omissions(
    everything: Sequence[SampleFile], sources: Sequence[Mapping[str, Any]], shown: Sequence[Any]
) -> str:
    total = sum(one["samples"] for one in sources)
    said = []
    if len(sources) < len(everything):
        said.append(f"{len(sources)} of {len(everything)} files of samples are shown")
    if len(shown) < total:
        said.append(f"{len(shown):,} of their {total:,} samples, whole groups")
    return ", and ".join(said) + "; the rest is in samples/." if said else ""


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Tokens, of a byte each, that may make one character."""


def tokenizer_of(run: Path, settings: dict[str, Any]) -> Tokenizer | None:
    """Load the run's tokenizer from a local file; None if there is none."""
    from tokenizers import Tokenizer

    named = [read_setting(settings, name) for name in ("model.tokenizer", "model.path")]
    folders = [run / MODEL, run / INITIAL_MODEL, *(Path(str(one)) for one in named if one)]
    for folder in folders:
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # its errors have no class of their own
                continue
    return None


def decode_tokens(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Decode each token to the text that it adds; bytes of a split character count for its last
    token. Without a tokenizer return token numbers."""
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

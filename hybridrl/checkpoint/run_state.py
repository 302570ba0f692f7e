"""The part of a checkpoint that the driver writes: its state at the end of a step, and which model,
tokenizer and data the run has."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError, DataError
from hybridrl.system.bounded_files import load_json, parse_json, read_text
from hybridrl.system.locations import Location

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.batch.batch import Batch

DRIVER = "driver.json"
MODEL_IDENTITY_FILE = "made_with.json"
MOST_BYTES = 4 << 30
"""Of `driver.json`: a user's sampler may keep something of each row."""
TOKENS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
"""Columns by which a data set is known again."""
MOST_TEXT = 10_000
"""Characters of the first row that a checkpoint keeps."""
KNOWN_ROWS = 100
"""Number of the first and of the last rows that are compared."""
_SAME_TENSORS = {
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Of a model's config.json, what neither its parameters nor its outputs depend on."""


@dataclass(frozen=True)
class RunState:
    """The state of a run's driver, plain data as it stands in `driver.json`.

    Attributes:
        step: The last one that is done.
        feed, trainer: States of the parts of that name.
        summary: Of the run so far.
        warmed_up: Whether the run began with a warm-up.
        data: Fingerprint of the training data; see `DataIdentity`.
        rows, first_row: Number of rows, and the text of the first; None: of an older version.
        watches: States of what watches the run, by name.
    """

    step: int
    feed: Mapping[str, Any]
    trainer: Mapping[str, Any]
    summary: Mapping[str, Any]
    warmed_up: bool
    data: int
    rows: int = 0
    first_row: str | None = None
    watches: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of `driver.json`."""
        return json.dumps(vars(self))

    @classmethod
    def load(cls, folder: Location) -> RunState:
        """Return the state in the folder of a step.

        Raises:
            OSError, ValueError: if it cannot be read.
        """
        found = parse_json(read_text(folder / DRIVER, MOST_BYTES))
        return cls(**{one.name: found[one.name] for one in fields(cls) if one.name in found})


class DataIdentity:
    """A fingerprint of training data, by which a resumed run recognises it.

    Args:
        rows: The data, as the trainer learns from it.
        tokenizer: Makes text of tokens.
    """

    def __init__(self, rows: Batch, tokenizer: PreTrainedTokenizerBase) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self.number = len(rows)

    @cached_property
    def fingerprint(self) -> int:
        """A number that is equal for equal data."""
        number = self.number
        first, last = range(min(KNOWN_ROWS, number)), range(max(0, number - KNOWN_ROWS), number)
        columns = [name for name in TOKENS if name in self._rows.columns]
        known = self._rows.take([*first, *last]).select(columns).to_pylist()
        return zlib.crc32(repr([number, known]).encode())

    @cached_property
    def first_row(self) -> str:
        """The text of the first row, for the messages of later runs."""
        rows = self._rows.take(range(min(1, self.number)))
        ids = [rows.ragged(name).values.tolist() for name in TOKENS if name in rows.columns]
        return "".join(str(self._tokenizer.decode(one)) for one in ids)[:MOST_TEXT]

    def check(self, state: RunState, folder: Location) -> None:
        """Refuse a checkpoint of other data.

        Args:
            folder: The checkpoint's, for the message.

        Raises:
            DataError: says how the data differs.
        """
        if self.fingerprint != state.data:
            raise DataError(
                f"{folder} was written by a run on other data than this one's {self.number} rows, "
                "on other tokens of them, or with others held out, which run.seed, eval.prompts "
                f"and the weights of a mixture choose.{self._difference(state)} Resume with the "
                "data, tokenizer and settings of that run, or train on from its model in a new run."
            )

    def _difference(self, state: RunState) -> str:
        """Return a sentence on the data of a checkpoint and that of this run."""
        if state.first_row is None:
            return ""
        before, now = state.first_row, self.first_row
        if before == now:
            return f" Its first row is the same; it had {state.rows} rows."
        same = next(
            (n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
            min(len(before), len(now)),
        )
        start = max(0, same - 40)
        was, now_is = (f"{'...' * bool(start)}{t[start : same + 80]!r}" for t in (before, now))
        return f" The first row differs after {same} characters: it was {was} and is {now_is}."


def check_plain_data(whose: str, state: Any) -> None:
    """Refuse a state that would come back from a JSON file as something else.

    Raises:
        ConfigError: naming whose it is.
    """
    shown = f"a {type(state).__name__} that contains itself, or too large a number"
    try:
        plain = _is_plain(state) and bool(json.dumps(state))
        shown = "" if plain else str(state)[:200]
    except (RecursionError, ValueError):
        plain = False
    if not plain:
        raise ConfigError(
            f"{whose}: its state() cannot be written to a checkpoint. It must be plain data: "
            "Python's numbers, texts, lists, and dictionaries whose keys are texts; it is "
            f"{shown}"
        )


def _is_plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str) and _is_plain(value) for key, value in state.items())
    if isinstance(state, list | tuple):
        return all(map(_is_plain, state))
    return state is None or isinstance(state, bool | int | float | str)


def describe_model_identity(
    model: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return which model and tokenizer a job learns with, as plain data.

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


def check_model_identity(folder: Location, now: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model or tokenizer, before any worker is built.

    Args:
        folder: The checkpoint's.
        now: What `describe_model_identity` says of this job.

    Raises:
        ConfigError: names what differs.
    """
    try:
        before = load_json(folder / MODEL_IDENTITY_FILE)
        old, new = before["model"], now["model"]
        tokens, crc32 = before["tokenizer"]["tokens"], before["tokenizer"]["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / MODEL_IDENTITY_FILE} could not be read ({type(error).__name__}: {error}). "
            "Resume from another step."
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

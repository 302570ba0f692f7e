"""The names of settings in other libraries (TRL, verl, OpenRLHF, NeMo-RL), with ours.

The table is `other_libraries.yaml`, from which the pages on moving from TRL and verl are made, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

TABLE = Path(__file__).with_name("other_libraries.yaml")
NONE, AUTOMATIC = "none", "automatic"


class ForeignSetting(NamedTuple):
    """A row of the table; the comment at its top says what the fields mean."""

    library: str
    table: str
    names: tuple[str, ...]
    here: tuple[str, ...]
    note: str = ""
    values: Mapping[str, str] = {}
    compute: str = ""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of this library; empty if there is none to be set."""
        return () if self.here in ((NONE,), (AUTOMATIC,)) else self.here

    def settings_for(self, name: str) -> tuple[str, ...]:
        """Return the settings that `name`, one of the row's names, stands for."""
        paired = len(self.names) == len(self.settings) > 1
        return (self.settings[self.names.index(name)],) if paired else self.settings


class _Match(NamedTuple):
    row: ForeignSetting
    name: str

    def answer(self, value: str, given: Mapping[str, str]) -> str:
        """Sentences on what to write instead of the name, and its value if that can be known."""
        settings = self.row.settings_for(self.name)
        if settings:
            called = " or ".join(f"`{setting}`" for setting in settings)
            sentences = [f"It is called {called} here.", self.row.note]
            converted = self.row.values.get(value.lower()) or _computed(
                self.row.compute, value, given
            )
            if converted:
                sentences.append(f"Write {settings[0]}={converted}.")
        elif self.row.here == (NONE,):
            sentences = ["There is none here.", self.row.note]
        else:
            sentences = ["Nothing has to be set for it here.", self.row.note]
        return " ".join(filter(None, sentences))


@cache
def foreign_settings() -> tuple[ForeignSetting, ...]:
    """Return the rows of the table, those of all libraries."""
    return tuple(
        ForeignSetting(
            library["title"],
            table,
            tuple(row["names"].split()),
            tuple(row["here"].split()),
            **{key: row[key] for key in ("note", "values", "compute") if key in row},
        )
        for library in yaml.safe_load(TABLE.read_text(encoding="utf-8")).values()
        for table, rows in library["tables"].items()
        for row in rows
    )


def explain_alias(key: str, value: str = "", arguments: Iterable[str] = ()) -> str:
    """Return what to write in place of another library's setting; empty if no library has it.

    The last words of the key count, as many as are known together. Where libraries mean different
    things by a name, each gets its sentences.

    Args:
        value: What the user set it to.
        arguments: The whole command line, from which some values can be computed.
    """
    if not (found := _matches(key)):
        return ""
    given = _values_given(arguments)
    answers: dict[str, list[str]] = {}
    for match in found:
        answers.setdefault(match.answer(value, given), []).append(match.row.library)
    if len(answers) == 1:
        return next(iter(answers))
    return " ".join(f"Of {' and '.join(who)}: {answer}" for answer, who in answers.items())


@cache
def _by_ending() -> Mapping[str, list[_Match]]:
    """Return the rows by every ending of their names that says enough: `rollout.n` and `lora_rank`,
    but not `n` or `name`."""
    found: dict[str, list[_Match]] = {}
    for row in foreign_settings():
        for name in row.names:
            for ending in _endings(name):
                if ending == name or "." in ending or "_" in ending:
                    found.setdefault(ending, []).append(_Match(row, name))
    return found


def _matches(key: str) -> list[_Match]:
    """A match for each library that has a name with the longest ending of `key` that any has."""
    for ending in _endings(key):
        if matches := _by_ending().get(ending):
            whole_first = sorted(matches, key=lambda match: match.name != ending)
            return list({match.row.library: match for match in reversed(whole_first)}.values())
    return []


def _endings(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _values_given(arguments: Iterable[str]) -> dict[str, str]:
    """The values of the command line, by the last word of their names and by our names."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        given[key] = given[key.rpartition(".")[2]] = value
        for row, name in _matches(key):
            if len(ours := row.settings_for(name)) == 1 and not row.compute:
                given.setdefault(ours[0], value)
    given.setdefault("actor.epochs", "1")  # no preset has more
    return given


def _computed(formula: str, value: str, given: Mapping[str, Any]) -> str:
    """The value of a formula such as `data.prompts_per_step / self`; empty if an operand was not
    given or the result is not a whole number."""
    words = formula.split()
    try:
        operands = [float(value if word == "self" else given[word]) for word in words[::2]]
        total = operands[0]
        for sign, operand in zip(words[1::2], operands[1:], strict=True):
            total = total * operand if sign == "*" else total / operand
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        return ""
    return str(round(total)) if abs(total - round(total)) < 1e-6 and total >= 1 else ""

"""Constraints on the values of settings, written beside the type:

    learning_rate: Annotated[float, NumberRange(above=0, most=1)] = 1e-6
    schedule: Annotated[str, OneOf("constant", "linear", "cosine")] = "constant"

`hybridrl.config.setting_types` looks at them; the reference page lists them.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from hybridrl.errors import suggest_name

_DEFAULT_MAXIMUM = 10**9
"""Largest number where nothing else is said: no count of things or seconds is larger."""


class ValueConstraint(Protocol):
    """A constraint on a value. Its `str` is a short description for the reference page."""

    def refusal(self, value: Any) -> str:
        """Return why the value is refused, "must be ..."; empty if it is valid. Further sentences
        may follow."""


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers from `least` (or above `above`) to `most` (or below `below`).

    Attributes:
        why: A sentence for who is outside, where the numbers do not explain themselves.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    why: str = ""

    def refusal(self, value: Any) -> str:
        if value > _DEFAULT_MAXIMUM and self.most is None and self.below is None:
            return f"must be {_DEFAULT_MAXIMUM:,} or less"
        inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return "" if inside else f"must be {self}{'. ' if self.why else ''}{self.why}"

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least:g} to {self.most:,}"
        ends = {
            "{:g} or more": self.least,
            "more than {:g}": self.above,
            "{:,} or less": self.most,
            "less than {:g}": self.below,
        }
        return " and ".join(words.format(end) for words, end in ends.items() if end is not None)


class OneOf:
    """A choice of one name."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def refusal(self, value: Any) -> str:
        return (
            "" if value in self.names else f"must be {self}.{suggest_name(str(value), self.names)}"
        )

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


class OneOrMoreOf(OneOf):
    """A choice of one name, or a list of several."""

    def refusal(self, value: Any) -> str:
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        unknown = [one for one in listed if one not in self.names]
        return f"must be {self}.{suggest_name(str(unknown[0]), self.names)}" if unknown else ""

    def __str__(self) -> str:
        return f"{super().__str__()}, or a list of them"


class NotEmpty:
    """A text or list that must not be empty."""

    def refusal(self, value: Any) -> str:
        return (
            "" if len(value.strip() if isinstance(value, str) else value) else "must not be empty"
        )

    def __str__(self) -> str:
        return ""  # goes without saying


class ValidPath:
    """A file name or path within the limits of the file system."""

    PART, WHOLE = 255, 4095

    def refusal(self, value: str) -> str:
        if not value.strip():
            return "must not be empty"
        encoded = value.encode(errors="replace")
        if b"\0" in encoded:
            return "must not have a NUL character"
        parts = max(map(len, encoded.split(b"/")))
        fits = parts <= self.PART and len(encoded) <= self.WHOLE
        return "" if fits else f"must be shorter: {self}, and {self.WHOLE:,} of a whole path"

    def __str__(self) -> str:
        return f"at most {self.PART} bytes between two `/`"


@dataclass(frozen=True)
class ListLength:
    """A list of a fixed length."""

    entries: int

    def refusal(self, value: Collection[Any]) -> str:
        return "" if len(value) == self.entries else f"must have {self}"

    def __str__(self) -> str:
        return f"{self.entries} entries"


class IsoDate:
    """A date such as 2026-11-25."""

    def refusal(self, value: str) -> str:
        try:
            datetime.date.fromisoformat(value)
        except ValueError:
            return f"must be {self}"
        return ""

    def __str__(self) -> str:
        return "a date such as 2026-11-25"


class NameOrNames:
    """A name or a list of names; functions may stand in their place."""

    def refusal(self, value: Any) -> str:
        listed = value if isinstance(value, list | tuple) else [value]
        if not all(callable(one) or (isinstance(one, str) and one.strip()) for one in listed):
            return f"must be {self}"
        refused = [ValidPath().refusal(one) for one in listed if isinstance(one, str)]
        return next(filter(None, refused), "")

    def __str__(self) -> str:
        return "a name or a list of names"


class RegexWithGroup:
    """A regular expression of Python's `re` with at least one group."""

    def refusal(self, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            return f"must be {self}; it does not compile: {error}"
        return "" if groups else f"must be {self}; it has none, so put what is wanted into brackets"

    def __str__(self) -> str:
        return "a regular expression with a group"


class AppliesIf:
    """No bound: the setting, or the group, counts only where others are set, or have a value. Of
    several beside one setting all have to hold.

    Args:
        conditions: `rollout.episode`, `executor=ray`, `.pp>1`; `.path` is another setting of its
            group. Any of them is enough.
    """

    def __init__(self, *conditions: str) -> None:
        self.conditions = conditions

    def __str__(self) -> str:
        values: dict[str, list[str]] = {}
        for condition in self.conditions:
            name, _, value = condition.partition("=")
            values.setdefault(name, []).append(value)
        return " or ".join(
            f"`{name}={'` or `'.join(given)}`" if any(given) else f"`{name}`"
            for name, given in values.items()
        )


def programs(*names: str) -> tuple[str, ...]:
    """Conditions that hold for these driver programs."""
    return tuple(f"trainer.name={name}" for name in names)


PositiveInt = Annotated[int, NumberRange(least=1)]
NonNegativeInt = Annotated[int, NumberRange(least=0)]
PositiveFloat = Annotated[float, NumberRange(above=0)]
NonNegativeFloat = Annotated[float, NumberRange(least=0)]
Seconds = Annotated[float, NumberRange(above=0)]
ProperFraction = Annotated[float, NumberRange(above=0, below=1)]
"""Of something of which a part has to be left."""
Probability = Annotated[float, NumberRange(least=0, most=1)]
LearningRate = Annotated[float, NumberRange(above=0, most=1)]
"""Of learning: the optimizer moves each weight by about so much in a step."""
NameOrPath = Annotated[str, ValidPath()]

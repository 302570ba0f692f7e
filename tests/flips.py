"""Another value of each setting than its default, from what the schema says of it."""

from __future__ import annotations

from typing import Any, get_origin

from hybridrl.config.constraints import NumberRange, OneOf
from hybridrl.config.schema import Config
from hybridrl.config.setting_types import (
    find_default,
    list_constraints,
    read_type_hints,
    strip_annotations,
)


def another_value(name: str, hint: Any, default: Any) -> Any:
    """One that the bounds of the setting allow.

    Raises:
        LookupError: for text and for what is made of it, of which the schema knows no values.
    """
    kind, said = strip_annotations(hint), list_constraints(hint)
    for bound in said:
        if isinstance(bound, OneOf):
            return next(one for one in bound.names if one not in (default, "auto", "none"))
    if kind is bool:
        return not default
    if kind in (int, float):
        return _number(
            kind, default, next((b for b in said if isinstance(b, NumberRange)), NumberRange())
        )
    if get_origin(kind) is list and default and kind != list[str]:
        return [_number(float, one, NumberRange(least=0, below=1)) for one in default]
    raise LookupError(f"{name} is text: say in the test which value it is to have.")


def default_at(name: str) -> Any:
    """The schema's default of a setting by its dotted name."""
    group: Any = Config
    *groups, leaf = name.split(".")
    for part in groups:
        group = strip_annotations(read_type_hints(group)[part])
    return find_default(group, leaf)


def _number(kind: type, default: float | None, bound: NumberRange) -> float:
    least = max(b for b in (bound.least, bound.above, -100.0) if b is not None)
    most = min(b for b in (bound.most, bound.below, 1e6) if b is not None)
    begin = default if default is not None else max(least, 0.0)
    tries = (
        (begin + 1, begin - 1)
        if kind is int
        else (begin / 2, begin + 0.25, begin - 0.25, begin + 1)
    )
    found = [kind(one) for one in tries if one != begin]
    return next(
        one for one in found if least < one < most or one == bound.least or one == bound.most
    )

"""Validation of settings against the types and constraints of the schema."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hybridrl.config.constraints import AppliesIf, OneOf, ValueConstraint

_MAX_STORED_INT = 2**63 - 1
"""Of whole numbers that are stored."""
_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a dictionary",
}
_ACCEPTED_TYPES: dict[Any, Any] = {
    int: numbers.Integral,
    float: numbers.Real,
    bool: bool,
    str: str,
    list: (list, tuple),
    dict: Mapping,
}
"""What a program may give for a setting of a type."""
_UNCHECKED_SETTINGS = ("reward.options", "cost.options", "rollout.engine_options")
"""Settings whose meaning only the user's functions, or vLLM, know."""
_Settings = TypeVar("_Settings")
read_type_hints: Callable[[type], Mapping[str, Any]] = cache(
    partial(get_type_hints, include_extras=True)
)
"""Return the types of a group's settings with their annotations."""


def find_invalid_values(settings: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each setting with an invalid value, with the sentence that refuses it.

    Args:
        settings: A group of settings.
        prefix: Its dotted name, with a dot at the end.
    """
    for name, hint in read_type_hints(type(settings)).items():
        value, setting = getattr(settings, name), f"{prefix}{name}"
        if is_dataclass(value):
            yield from find_invalid_values(value, f"{setting}.")
        elif setting not in _UNCHECKED_SETTINGS:
            yield from _check_value(setting, hint, value)


def _check_value(setting: str, hint: Any, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and not list_constraints(hint):
        for name, entry in value.items():
            yield from _check_value(
                f"{setting}.{name}", (*get_args(strip_annotations(hint)), Any, Any)[1], entry
            )
    elif refusal := explain_invalid_value(hint, value):
        yield setting, format_refusal(setting, value, hint, refusal)


def format_refusal(setting: str, value: Any, hint: Any, refusal: str) -> str:
    """Format the sentence that refuses a value.

    Args:
        refusal: "must be ...", and what there is to say after that.
    """
    first, dot, rest = refusal.partition(". ")
    null = ", or null" if is_optional(hint) and not refusal.startswith("each ") else ""
    shown = "null" if value is None else f"'{value}'" if value in ("", " ") else value
    end = "" if (dot + rest).endswith(("?", ".")) else "."
    return f"{setting}={shown}: {first.removesuffix('.')}{null}{dot}{rest}{end}"


def is_group(hint: Any) -> bool:
    """Return whether the type is a group of settings."""
    return is_dataclass(strip_annotations(hint))


def is_optional(hint: Any) -> bool:
    """Return whether the setting may be null."""
    if get_origin(hint) is Annotated:
        return is_optional(get_args(hint)[0])
    return type(None) in get_args(hint)


def strip_annotations(hint: Any) -> Any:
    """Strip annotations and null from a type: `int`, `list[float]`, a dataclass."""
    if get_origin(hint) is Annotated:
        return strip_annotations(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return strip_annotations(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint


def list_constraints(hint: Any) -> list[ValueConstraint]:
    """List the constraints of a type."""
    return [said for said in _list_annotations(hint) if not isinstance(said, AppliesIf)]


def find_condition(hint: Any) -> list[AppliesIf]:
    """Return the conditions under which a setting counts. All have to hold, each by any of its
    settings."""
    return [said for said in _list_annotations(hint) if isinstance(said, AppliesIf)]


def _list_annotations(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        inner, *said = get_args(hint)
        return [*_list_annotations(inner), *said]
    if get_origin(hint) in (Union, types.UnionType):
        return [bound for kind in get_args(hint) for bound in _list_annotations(kind)]
    return []


def describe_type(hint: Any) -> str:
    """Describe a type for people: "a whole number, 1 or more"."""
    kind = strip_annotations(hint)
    said = list_constraints(hint)
    is_named = any(isinstance(bound, OneOf) for bound in said)
    words = ["" if is_named else _TYPE_NAMES.get(get_origin(kind) or kind, ""), *map(str, said)]
    if get_origin(kind) is list:
        words.append(f"each {describe_type(get_args(kind)[0])}")
    return ", ".join(filter(None, words))


def describe_expected(hint: Any) -> str:
    """Describe what a value must be, as the end of a sentence: "must be ..."."""
    return f"must be {describe_type(hint)}{', or null' if is_optional(hint) else ''}"


def explain_wrong_type(hint: Any, value: Any) -> str:
    """Return why a value has the wrong type, "must be ..."; empty if it has the right one."""
    kind = strip_annotations(hint)
    if value is None and (is_optional(hint) or kind is Any):
        return ""
    wanted: Any = (
        kind if is_dataclass(kind) else _ACCEPTED_TYPES.get(get_origin(kind) or kind, object)
    )
    is_of_type = isinstance(value, wanted)
    if not is_of_type or (isinstance(value, bool) and kind in (int, float)):
        return f"must be {describe_type(hint) or 'a group of settings'}"
    hint_of_entry, entries = _entries(kind, value)
    found = next(filter(None, (explain_wrong_type(hint_of_entry, entry) for entry in entries)), "")
    return f"each {found}" if found else ""


def _entries(kind: Any, value: Any) -> tuple[Any, Iterable[Any]]:
    """Return the entries of a list or dictionary, and the type that they must have."""
    if isinstance(value, list | tuple):
        return (*get_args(kind), Any)[0], value
    if isinstance(value, Mapping):
        return (*get_args(kind), Any, Any)[1], value.values()
    return Any, ()


def explain_invalid_value(hint: Any, value: Any) -> str:
    """Return why a value is invalid, "must be ..."; empty if it is valid."""
    if found := explain_wrong_type(hint, value):
        return found
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and abs(value) > _MAX_STORED_INT:
        return "must fit into 64 bits"
    if isinstance(value, str) and "\0" in value:
        return "must be text without the character NUL"
    hint_of_entry, entries = _entries(strip_annotations(hint), value)
    if found := next(
        filter(None, (explain_invalid_value(hint_of_entry, entry) for entry in entries)), ""
    ):
        return found if found.startswith("each ") else f"each {found}"
    return next(filter(None, (bound.refusal(value) for bound in list_constraints(hint))), "")


def reset_to_defaults(settings: _Settings, names: Iterable[str]) -> _Settings:
    """Reset the named settings to their defaults."""
    for name in names:
        settings = _reset_to_default(settings, name.split("."))
    return settings


def _reset_to_default(settings: Any, path: list[str]) -> Any:
    name, *rest = path
    if rest and is_dataclass(inner := getattr(settings, name)):
        value = _reset_to_default(inner, rest)
    else:
        value = find_default(type(settings), name)
    return replace(settings, **{name: value})


def find_default(group: type, name: str) -> Any:
    """Return the default of a setting."""
    return getattr(group(), name)

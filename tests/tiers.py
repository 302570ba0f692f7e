"""Which cases of a product `make test` runs, and which only `make test-more`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], kept: Collection[Any] | int, several: bool = False) -> list[Any]:
    """Return cases for `parametrize`, all but some of them for `make test-more`.

    Args:
        kept: The cases that stay in `make test`, or n: every n-th one.
        several: A case is a tuple, of a value for each of several parameters.
    """
    names = list(cases)
    stay = names[::kept] if isinstance(kept, int) else kept
    return [
        name
        if name in stay
        else pytest.param(*(name if several else (name,)), marks=pytest.mark.more)
        for name in names
    ]


def chosen_of(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the cases of a module's parameters that this session runs, each once, in order.

    A fixture that computes what the cases look at leaves out the others.
    """
    cases = [
        tuple(item.callspec.params[name] for name in names)
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and item.callspec.params.keys() >= set(names)
    ]
    return list(dict.fromkeys(cases))

"""Sweeps: several jobs from one command line, `--multirun algorithm=grpo,rloo
run.seed=range(3)`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hybridrl.errors import ConfigError


def expand_sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Expand a command line to the overrides of each job, the product of all listed values. Commas
    separate values outside of quotes and brackets; `range(first, end)` yields integers.

    Raises:
        ConfigError: for functions of Hydra's other than `choice` and `range`.
    """
    return [list(chosen) for chosen in itertools.product(*map(_list_choices, arguments))]


def _list_choices(argument: str) -> list[str]:
    key, _, text = argument.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:  # characters that only text has
        is_whole = text[:1] in ("'", '"', "[", "{")
        return [argument] if is_whole else [f"{key}={value.strip()}" for value in text.split(",")]
    if not parsed.is_sweep_override():
        return [argument]
    try:
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    except (HydraException, AssertionError) as error:  # `glob` and `interval`
        raise ConfigError(
            f"{argument}: a sweep has values with commas between, or range(1, 4)."
        ) from error

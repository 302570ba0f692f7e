"""Samplers: which rows a step trains on, chosen by the scores of earlier samples.

A sampler is built with those of `rows` (the training data, tokenized), `seed` and `config` that its
`__init__` names, and with `data.sampler_options`. It has `draw(number)`, which returns that many
row numbers, and `update(rows, scores)`, which learns the outcomes of samples (their scores without
rewards of steps; NaN: dropped), and of which row each is an answer; and, to go on where a run
stopped, `state()` and `load_state(state)`, of plain data. In a mixture each source has a sampler of
its own, with its own rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config
from hybridrl.data.samplers.difficulty_sampler import DifficultySampler
from hybridrl.data.samplers.pass_rate_sampler import PassRateSampler
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system import user_code

SAMPLER_SETTING = "data.sampler"
BUILT_IN_SAMPLERS: Mapping[str, Callable[..., Any]] = {
    "pass_rate": PassRateSampler,
    "difficulty": DifficultySampler,
}
SAMPLER_ARGUMENTS = ("rows", "seed", "config")
RowNumbers = npt.NDArray[np.int64]


def check_sampler(config: Config) -> None:
    """Check that the sampler of the settings exists and has the options that are set.

    Raises:
        ConfigError: naming what it lacks.
    """
    spec = config.data.sampler
    if spec is None:
        return
    found = user_code.resolve_user_object(SAMPLER_SETTING, spec, BUILT_IN_SAMPLERS)
    for name in ("draw", "update"):
        if not callable(getattr(found, name, None)):
            raise ConfigError(
                f"{SAMPLER_SETTING}={spec} has no method `{name}`; a sampler has draw(number), "
                "which returns row numbers, and update(rows, scores)."
            )
    parameters = inspect.signature(found).parameters
    known = [name for name in parameters if name not in SAMPLER_ARGUMENTS]
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in config.data.sampler_options:
        if name not in known and not is_open:
            raise ConfigError(
                f"data.sampler_options.{name}: {SAMPLER_SETTING}={spec} has no such option; it has "
                f"{', '.join(known) or 'none'}.{suggest_name(str(name), known)}"
            )


def build_sampler(config: Config, rows: Batch, seed: int) -> Any:
    """Build the sampler for these rows; None if each row comes once per epoch.

    Raises:
        ConfigError: if an option, or the data, will not do.
    """
    spec = config.data.sampler
    if spec is None:
        return None
    made = user_code.resolve_user_object(SAMPLER_SETTING, spec, BUILT_IN_SAMPLERS)
    offered = {"rows": rows, "seed": seed, "config": config}
    named = inspect.signature(made).parameters
    given = {name: value for name, value in offered.items() if name in named}
    try:
        return made(**given, **config.data.sampler_options)
    except TypeError as error:
        if spec not in BUILT_IN_SAMPLERS:  # one of the user's: its own traceback says more
            raise
        shown = ", ".join(f"{name}={value}" for name, value in config.data.sampler_options.items())
        raise ConfigError(
            f"data.sampler_options has {shown}: {SAMPLER_SETTING}={spec} cannot work with that "
            f"({error})."
        ) from error


def draw_rows(sampler: Any, number: int, most: int, config: Config) -> RowNumbers:
    """Draw `number` of the `most` rows with the sampler, and check what it returns.

    Raises:
        ConfigError: if it gives something else.
    """
    drawn, spec = np.asarray(sampler.draw(number)), config.data.sampler
    whole = drawn.ndim == 1 and (np.issubdtype(drawn.dtype, np.integer) or not len(drawn))
    if not whole or len(drawn) != number:
        raise ConfigError(
            f"{SAMPLER_SETTING}={spec}: draw({number}) must return {number} row numbers, and it "
            f"returned {drawn!r}."
        )
    if number and not (drawn.min() >= 0 and drawn.max() < most):
        raise ConfigError(
            f"{SAMPLER_SETTING}={spec}: draw({number}) returned row numbers from {drawn.min()} to "
            f"{drawn.max()}, but the data has rows 0 to {most - 1}."
        )
    return drawn.astype(np.int64)

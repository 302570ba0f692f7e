"""Data mixtures: several sources of rows (`data.sources.<name>`) that each step samples by
weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hybridrl.batch.batch import SOURCE_COLUMN, Batch
from hybridrl.config.role_models import check_group_names, parse_group
from hybridrl.config.schema import DataConfig
from hybridrl.config.setting import Setting
from hybridrl.data.held_out import DataSplits
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.table_columns import without_mixed_columns
from hybridrl.data.tasks import load_task
from hybridrl.errors import ConfigError, DataError

MIXTURE_SETTINGS = (
    *("sources", "prompts_per_step", "shuffle", "order", "max_shuffle_error"),
    *("sampler", "sampler_options"),
)
"""Settings of the data that no source has for itself."""
SOURCE_SETTINGS = ("weight", "reward", "eval_prompts")
REASONING_GYM_TASK = "reasoning_gym"
"""A task, and the reward function of its rows."""


@dataclass(frozen=True)
class DataSource:
    """A source of a data mixture and its settings.

    Attributes:
        data: Where its rows come from, and what its columns are.
        weight: Its rows in a step, relative to those of other sources.
        reward: Functions that score its rows in place of `reward.function`; None: that.
        eval_prompts: Number of its rows to hold out; None: its share of `eval.prompts`.
    """

    name: str
    data: DataConfig
    weight: float = 1.0
    reward: list[str] | None = None
    eval_prompts: int | None = None

    @property
    def setting(self) -> Setting:
        """Return the name of its settings: `data.sources.gsm8k`."""
        return Setting("data.sources") / self.name

    @property
    def origin(self) -> RowOrigin:
        """Return the names by which sentences about its rows call them and their settings."""
        return RowOrigin(self.setting, held_out=self.setting / "eval_prompts")


def parse_sources(config: DataConfig) -> list[DataSource]:
    """Parse the sources of a mixture, whose defaults are the other settings of `data`. Return an
    empty list if there is no mixture.

    Raises:
        ConfigError: for a setting or a value that is none.
    """
    return [_parse_source(config, name, said) for name, said in config.sources.items()]


def list_source_names(config: DataConfig) -> list[str]:
    """Return the values of the column `source` that metrics are split by; empty if all rows are of
    one kind."""
    if config.sources:
        return list(config.sources)
    tasks = list(config.tasks) if config.task == REASONING_GYM_TASK else []
    return tasks if len(tasks) > 1 else []


def find_source_rewards(config: DataConfig) -> dict[str, list[str]]:
    """Return the reward functions of the sources that have their own, by source."""
    return {s.name: s.reward for s in parse_sources(config) if s.reward is not None}


def load_mixture(
    config: DataConfig,
    load: Callable[[DataConfig, RowOrigin, int], DataSplits],
    held_out: int,
) -> DataSplits:
    """Load the rows of all sources one after the other, with a column `source`.

    Args:
        load: Reads the rows of a source, of which it holds out the given number.
        held_out: `eval.prompts`.

    Raises:
        ConfigError, DataError: what `load` raises, with the name of the source.
    """
    sources = parse_sources(config)
    whole = sum(source.weight for source in sources)
    parts: list[list[Batch]] = [[], [], []]
    for source in sources:
        number = source.eval_prompts
        if number is None:
            number = max(1, round(held_out * source.weight / whole)) if held_out else 0
        try:
            found = load(source.data, source.origin, number)
        except (ConfigError, DataError) as error:
            raise type(error)(f"Source `{source.name}`: {error}") from error
        for part, rows in zip(parts, found, strict=True):
            if rows is not None:
                part.append(rows.with_columns({SOURCE_COLUMN: [source.name] * len(rows)}))
    training, kept, examples = (_concat_sources(part) for part in parts)
    assert training is not None
    return DataSplits(training, kept, examples)


def collect_task_characters(config: DataConfig) -> str:
    """Return the characters that the prompts and answers of the built-in tasks use, each once.

    Raises:
        ConfigError: if one is no task.
    """
    tasks = [(source.setting, source.data.task) for source in parse_sources(config)]
    tasks = tasks or [(DATA.settings, config.task)]
    found = [load_task(task, setting / "task").CHARACTERS for setting, task in tasks if task]
    return "".join(dict.fromkeys("".join(found)))


class SourceProportions:
    """A schedule that picks the source of each next row, so that the drawn shares follow the
    weights to within a row or two at any time.

    Args:
        weights: More than 0 each.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(weights)

    def next(self, number: int) -> list[int]:
        """Return the index of the source of each of the next rows: always the source that is
        furthest behind its share."""
        found = []
        for total in range(sum(self._drawn) + 1, sum(self._drawn) + number + 1):
            behind = [s * total - d for s, d in zip(self._shares, self._drawn, strict=True)]
            place = max(range(len(behind)), key=behind.__getitem__)
            self._drawn[place] += 1
            found.append(place)
        return found

    def state(self) -> dict[str, Any]:
        return {"shares": self._shares, "drawn": [*self._drawn]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; if the weights have changed, count from zero."""
        if state["shares"] == self._shares:
            self._drawn = [int(number) for number in state["drawn"]]


def _parse_source(config: DataConfig, name: str, said: Any) -> DataSource:
    setting = Setting("data.sources") / name
    own = [f.name for f in fields(DataConfig) if f.name not in MIXTURE_SETTINGS]
    check_group_names(setting, said, [*SOURCE_SETTINGS, *own])
    given = {key: value for key, value in said.items() if key in own}
    defaults = replace(config, task=None, path=None, tasks=[], task_options={}, sources={})
    data = parse_group(setting, defaults, given)
    if (data.task is None) == (data.path is None):
        raise ConfigError(
            f"{setting} must have either a path (a file, folder or data set) or a task (a built-in "
            f"one), and has {'neither' if data.path is None else 'both'}."
        )
    weight, number = said.get("weight", 1.0), said.get("eval_prompts")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_number and 0 < weight < math.inf):
        raise ConfigError(f"{setting / 'weight'}={weight}: must be a number, more than 0.")
    if number is not None and not (type(number) is int and number >= 0):
        raise ConfigError(
            f"{setting / 'eval_prompts'}={number}: must be a whole number, 0 or more."
        )
    reward = said.get("reward", REASONING_GYM_TASK if data.task == REASONING_GYM_TASK else None)
    functions = [reward] if isinstance(reward, str) else reward
    if functions is not None and not (
        isinstance(functions, Sequence) and functions and all(map(_is_name, functions))
    ):
        raise ConfigError(
            f"{setting / 'reward'}={reward}: must be a reward function or a list of them."
        )
    return DataSource(
        name, data, float(weight), None if functions is None else list(functions), number
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _concat_sources(parts: Sequence[Batch]) -> Batch | None:
    """Concatenate the batches; columns missing in a source are null there."""
    if not parts:
        return None
    is_small = all(len(part.pieces) < 2 for part in parts)
    kept = map(Batch, without_mixed_columns([part.table for part in parts], "sources"))
    return Batch.concat([*kept], fill_missing=True, in_one_piece=is_small)

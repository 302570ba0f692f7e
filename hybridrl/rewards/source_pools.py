"""Reward functions by source: a pool for each source of rows whose `data.sources.<name>.reward`
replaces `reward.function`, and one for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.batch.batch import SOURCE_COLUMN
from hybridrl.config.schema import RewardConfig
from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError, RewardError, suggest_name
from hybridrl.rewards.loading import make_short_names, parse_function_list, resolve_functions
from hybridrl.rewards.options import REWARD, FunctionSettings
from hybridrl.rewards.returned_scores import StepRewards
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.rewards.scoring_round import RewardResult
from hybridrl.system.content_cache import ContentCache

SourceSettings = dict[str | None, RewardConfig]


def resolve_source_settings(
    config: RewardConfig,
    own: Mapping[str, Sequence[str]],
    sources: Sequence[str],
    group: Setting = REWARD.group,
) -> SourceSettings:
    """Return the reward settings of each source with functions of its own, and those of all other
    rows under None; functions of sources all have weight 1.

    Args:
        own: The functions of sources that have their own.
        sources: The names of all; empty where there is no mixture.

    Raises:
        ConfigError: for a function that there is not, and for options of one that no source has.
    """
    named = {FunctionSettings.of(group, name).function: own[name] for name in own}
    for setting, functions in ({group / "check": config.check} | named).items():
        make_short_names(parse_function_list(functions, setting), setting)
    found: SourceSettings = {}
    if not sources or set(sources) - set(own):
        found[None] = config
    for name, functions in own.items():
        found[name] = replace(config, function=list(functions), weights=None)
    known = {name: make_short_names(resolve_functions(one)[0]) for name, one in found.items()}
    names = [function for functions in known.values() for function in functions]
    for option in config.options:
        if own and option not in names:
            raise ConfigError(
                f"`{group / 'options' / option}` is set, but neither `{group / 'function'}` nor "
                f"the reward of a source names `{option}`; they have "
                f"{', '.join(names)}.{suggest_name(option, names)}"
            )
    if not own:
        return found
    return {
        name: replace(one, options={k: v for k, v in one.options.items() if k in known[name]})
        for name, one in found.items()
    }


class SourceRewardPools:
    """A `RewardPool` for each source with functions of its own, and one for all other rows. Rows
    whose settings name no function score 0, for a model or a judge to add to."""

    def __init__(
        self,
        settings: SourceSettings,
        group: Setting = REWARD.group,
        cache: ContentCache | None = None,
    ) -> None:
        self._names = list(settings)
        self._pools = {
            name: _build_pool(config, FunctionSettings.of(group, name), cache)
            for name, config in settings.items()
            if resolve_functions(config)[0]
        }

    def __bool__(self) -> bool:
        return bool(self._pools)

    def asks_for(self, entry: str) -> bool:
        return any(pool.asks_for(entry) for pool in self._pools.values())

    def start(self) -> None:
        for pool in self._pools.values():
            pool.start()

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        progress: Callable[[], None] = lambda: None,
        groups: Sequence[int] | None = None,
    ) -> RewardResult:
        """Score rows with the pool of their source; a function's column is NaN for rows that it did
        not score.

        Raises:
            RewardError: also for a row of a source that has no functions.
        """
        if self._names == [None] and self._pools:
            return self._pools[None].score(rows, progress, groups=groups)
        scores, outcomes = [0.0] * len(rows), [math.nan] * len(rows)
        steps: list[StepRewards] = [[] for _ in rows]
        # On every rank the same, whatever sources its rows are of.
        named = (column for pool in self._pools.values() for column in pool.columns)
        columns = {name: [math.nan] * len(rows) for name in named}
        found = []
        for name, places in self._places(rows).items():
            of_source = [rows[place] for place in places]
            mine = None if groups is None else [groups[place] for place in places]
            result = self._pools[name].score(of_source, progress, groups=mine)
            found.append(result)
            of_rows = zip(places, result.scores, result.outcomes, result.steps, strict=True)
            for place, score, outcome, parts in of_rows:
                scores[place], outcomes[place], steps[place] = score, outcome, parts
            for column, values in result.columns.items():
                whole = columns.setdefault(column, [math.nan] * len(rows))
                for place, value in zip(places, values, strict=True):
                    whole[place] = value
        failed = [result.first_failure for result in found if result.first_failure]
        return RewardResult(
            scores,
            columns,
            sum(result.failures for result in found),
            sum(result.timeouts for result in found),
            failed[0] if failed else None,
            outcomes,
            steps,
        )

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _places(self, rows: Sequence[Mapping[str, Any]]) -> dict[str | None, list[int]]:
        found: dict[str | None, list[int]] = {}
        for place, row in enumerate(rows):
            source = row.get(SOURCE_COLUMN)
            name = source if source in self._names else None
            if name not in self._names:
                raise RewardError(
                    f"A row is of the source {source!r}, which has no reward function; there are "
                    f"those of {', '.join(map(str, self._names))}."
                )
            if name in self._pools:  # else its rows score 0
                found.setdefault(name, []).append(place)
        return found


def _build_pool(
    config: RewardConfig, settings: FunctionSettings, cache: ContentCache | None
) -> RewardPool:
    functions, weights = resolve_functions(config)
    return RewardPool(
        functions,
        weights,
        options=config.options,
        processes=config.processes or 1,
        timeout_s=config.timeout_s,
        on_error=config.on_error,
        error_value=config.error_value,
        watched=len(functions) - len(parse_function_list(config.function)),
        env=config.env,
        settings=settings,
        cache=cache,
    )

"""Whether reward functions can score rows of this data, found before a worker starts.

That is for programs that add no columns of their own before they ask for rewards: the built-in
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import Config, RewardConfig
from hybridrl.core.batch import is_of_data
from hybridrl.errors import ConfigError, DataError, RewardError
from hybridrl.rewards import RewardPool, function_list
from hybridrl.rewards.loading import check_fit, is_builtin, load_function, said_of, short_names
from hybridrl.rewards.options import options_of
from hybridrl.trainers import load_roles

if TYPE_CHECKING:
    from hybridrl.core.batch import Batch

COMPARE = ("contains", "numeric", "boxed")
"""Built-in functions that refuse answers, and take a moment for a hundred thousand."""
TO_ANSWERS = ("exact", "math", *COMPARE)
"""Built-in functions that compare responses with answers."""
LONGEST_S = 10.0
"""Of a trial: a function that takes longer is not waited for."""
LONGEST_IMPORT_S = 20.0
"""Of the user's file; `reward.timeout_s` if that is longer."""


def check_rewards(config: Config, prompts: Batch, held_out: Batch | None = None) -> list[str]:
    """Holds the parameters of reward functions against the columns of the data, and has the user's
    checked in a reward process (`check_reward` of their modules). Where a failure would end the job
    (`reward.on_error=fail`), tries them: built-in ones on every answer, the user's on the first
    row, with its right answer as the response.

    Returns:
        What the functions' modules have to say to the user.

    Args:
        prompts: Tokenized; nothing is said of rows of another kind.
        held_out: Further ones, whose answers are looked at, too.

    Raises:
        ConfigError: names the function, the parameter and everything that a row has; or the
            function that compares with answers where there are none.
        DataError: names the row whose answer nothing can be compared with.
        RewardError: quotes the row, and says what the function did.
        MachineError: if a function cannot work on this machine.
    """
    if "prompt" not in prompts.columns:
        return []
    kinds = {spec.worker for spec in load_roles(config).values()}
    remarks: list[str] = []
    for kind in sorted(kinds & {"reward", "cost"}):
        settings = getattr(config, kind)
        if settings is not None:
            with said_of(kind):
                _check_compares(config, settings)
                remarks += _check(settings, prompts, tries=config.rollout.episode is None)
                if held_out is not None:
                    _check_answers(settings, held_out)
    return list(dict.fromkeys(remarks))


def _check(settings: RewardConfig, prompts: Batch, *, tries: bool) -> list[str]:
    """Remarks of the functions of one role.

    Args:
        tries: Call the user's functions on a row.
    """
    functions = function_list(settings.function)
    check_fit(functions, settings.options, filter(is_of_data, prompts.columns))
    _check_options(functions, settings)
    _check_answers(settings, prompts)
    if all(map(is_builtin, functions)):
        return []
    tries = tries and settings.on_error == "fail" and len(prompts) > 0
    row = prompts.slice(0, 1).rows_for_users()[0] if tries else None
    return _try(functions, settings, row)


def _check_compares(config: Config, settings: RewardConfig) -> None:
    """Refuses to compare with answers that there are none of: an empty response would be right."""
    names = [name for name in function_list(settings.function) if name in TO_ANSWERS]
    if names and config.data.task is None and config.data.answer_column is None:
        raise ConfigError(
            f"reward.function={names[0]} compares responses with answers, and "
            "data.answer_column=null says that there are none. Name their column, or another "
            "function."
        )


def _check_options(functions: Sequence[Any], settings: RewardConfig) -> None:
    """Calls built-in functions once with their options, whose types nobody else knows."""
    names = short_names(functions)
    for name, given in zip(functions, options_of(names, settings.options), strict=True):
        if not is_builtin(name) or not given:
            continue
        try:
            load_function(name)(prompt="1", response="1", answer="1", **given)
        except (TypeError, ValueError) as error:
            shown = ", ".join(
                f"reward.options.{name}.{key}={value}" for key, value in given.items()
            )
            raise ConfigError(f"{shown}: `{name}` cannot work with that: {error}.") from error


def _check_answers(settings: RewardConfig, prompts: Batch) -> None:
    """Refuses answers that nothing can be compared with, where that would end the job."""
    names = [name for name in function_list(settings.function) if name in COMPARE]
    for name in names if settings.on_error == "fail" else ():
        function = load_function(name)
        for answer, prompt in zip(prompts["answer"], prompts["prompt"], strict=True):
            try:
                function(prompt=prompt, response="", answer=answer)
            except ValueError as error:
                raise DataError(
                    f"reward.function={name} cannot score the prompt that begins with "
                    f"{prompt[:60]!r}: {error} Mend the answer or leave the row out; or take "
                    "another function, or reward.on_error=drop."
                ) from error


def _try(functions: Sequence[Any], settings: RewardConfig, row: dict[str, Any] | None) -> list[str]:
    limits = {"timeout_s": settings.timeout_s, "on_error": "drop"}
    with RewardPool(functions, settings.weights, settings.options, **limits) as pool:
        pool.start(LONGEST_IMPORT_S)
        if row is None:
            return pool.remarks
        row["response"] = row.get("answer", "")
        found = pool.score([row], within_s=LONGEST_S)
    if found.first_failure and not (found.timeouts and settings.timeout_s > LONGEST_S):
        raise RewardError(
            "Tried before the start, on the first row of the data with its answer as the "
            f"response: {found.first_failure.rstrip()}\nMend the function; or set "
            "`reward.on_error` to `drop` or `value`, to go on in spite of such rows."
        )
    return pool.remarks

"""Checks of evaluation settings: sets, baseline, early stopping, best checkpoint, tripwires."""

from __future__ import annotations

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name
from hybridrl.evaluation.answer_extraction import resolve_extractor
from hybridrl.evaluation.baseline import EvalBaseline
from hybridrl.evaluation.eval_sets import (
    HELD_OUT_SET,
    ResolvedEvalSet,
    evaluates_held_out,
    resolve_eval_sets,
)
from hybridrl.evaluation.evaluation_function import check_evaluation_function
from hybridrl.rewards.loading import check_reward_functions, parse_function_list
from hybridrl.rewards.options import FunctionSettings
from hybridrl.trainers import load_roles, load_trainer


def _check_evaluated_program(config: Config) -> None:
    trains = load_trainer(config.trainer.name).TRAINS
    if not config.eval.sets:
        if config.eval.held_out is False and not trains:
            raise ConfigError(
                "eval.held_out=false, and there are no eval.sets: nothing would be evaluated. "
                "Leave eval.held_out out, or set eval.sets.<name>.data.path=<file>."
            )
        return
    roles = load_roles(config)
    if not any(spec.generates for spec in roles.values()) or "reward" not in roles:
        lacks = "nothing is scored" if "reward" not in roles else "nothing is sampled"
        raise ConfigError(
            f"eval.sets with trainer.name={config.trainer.name}: sets are prompts whose responses "
            f"are scored, and {lacks} in this program. Leave eval.sets out, and evaluate its model "
            "afterwards: algorithm=evaluate model.path=<the run's folder>."
        )


def _check_sets(config: Config) -> None:
    problems = ErrorCollector()
    for one in resolve_eval_sets(config).values():
        for check in (_check_interval, _check_scoring, _check_function):
            with problems.noted():
                check(config, one)
    problems.raise_if_any()


def _check_interval(config: Config, one: ResolvedEvalSet) -> None:
    steps, own = config.trainer.known_steps, one.own
    if not load_trainer(config.trainer.name).TRAINS or own.at_start or own.at_end:
        return
    if not one.every or one.every > steps:
        setting = f"{one.setting}.every" if own.every is not None else "eval.every"
        raise ConfigError(
            f"{setting}={one.every} with trainer.steps={steps}, {one.setting}.at_start=false and "
            f"{one.setting}.at_end=false: the set would never be evaluated. Set "
            f"{one.setting}.every to {steps} or less."
        )


def _check_scoring(config: Config, one: ResolvedEvalSet) -> None:
    functions = parse_function_list(one.reward.function)
    resolve_extractor(f"{one.setting}.extract", one.own.extract, functions)
    if one.is_verified:
        named = FunctionSettings.of(one.setting / "reward")
        check_reward_functions(functions, one.reward.weights, one.reward.options, 0, named)


def _check_function(config: Config, one: ResolvedEvalSet) -> None:
    if one.own.function is None:
        return
    for name in ("metrics", "by_column", "extract"):
        if getattr(one.own, name) is not None:
            raise ConfigError(
                f"{one.setting}.{name} with {one.setting}.function={one.own.function}: what a "
                f"function measures it says itself. Leave {one.setting}.{name} out."
            )
    check_evaluation_function(f"{one.setting}.function", one.own.function)


def _check_baseline(config: Config) -> None:
    if config.eval.baseline is not None:
        EvalBaseline.named(config.eval.baseline)


def _check_stop(config: Config) -> None:
    stop, trains = config.eval.stop, load_trainer(config.trainer.name).TRAINS
    if stop.metric is None:
        return
    setting = f"eval.stop.metric={stop.metric}"
    if not trains:
        raise ConfigError(
            f"{setting}: trainer.name={config.trainer.name} takes no steps that could end early. "
            "Leave it out."
        )
    if stop.patience is None and stop.target is None:
        raise ConfigError(
            f"{setting} says what is looked at, but not when the run ends. Set "
            "eval.stop.patience=<evaluations>, or eval.stop.target=<value>."
        )
    every = _check_metric_exists(config, "eval.stop.metric", stop.metric)
    if not every or every >= config.trainer.known_steps:
        raise ConfigError(
            f"{setting}: it is evaluated every {every} steps (0: never between the first and the "
            f"last), and the run has {config.trainer.steps}, so it would end nothing. Evaluate "
            "more often."
        )


def _check_best(config: Config) -> None:
    if config.checkpoint.best is not None:
        _check_metric_exists(config, "checkpoint.best", config.checkpoint.best)


def _check_tripwires(config: Config) -> None:
    window, steps = config.guard.tripwires, config.trainer.known_steps
    if not window:
        return
    if not any(spec.generates for spec in load_roles(config).values()):
        raise ConfigError(
            f"guard.tripwires={window} watches rewards and samples, and trainer.name="
            f"{config.trainer.name} has none. Leave it out."
        )
    if window == 1 or 2 * window > steps:
        raise ConfigError(
            f"guard.tripwires={window} with trainer.steps={steps}: windows of so many steps are "
            "compared, so each needs 2 steps or more, and the run at least two of them. Set "
            f"guard.tripwires to {f'2 to {steps // 2}' if steps > 3 else 0}."
        )


def _check_metric_exists(config: Config, setting: str, named: str) -> int:
    """Check that a set measures the metric, as far as known before evaluation; return the steps
    between its evaluations."""
    head, _, rest = named.removeprefix("-").partition("/")
    name, _, metric = rest.partition("/")
    sets = resolve_eval_sets(config)
    if head != "eval" or not metric:
        if named.removeprefix("-") == "accuracy" and not evaluates_held_out(config, trains=True):
            raise ConfigError(
                f"{setting}={named}: eval.held_out=false, so there is no accuracy. Name a figure "
                "of a set, such as eval/<set>/accuracy."
            )
        return config.eval.every
    if name not in sets:
        if name in ("loss", HELD_OUT_SET) or "@" in name:
            return config.eval.every
        raise ConfigError(
            f"{setting}={named}: there is no set `{name}`; there are "
            f"{', '.join(sets) or 'none'}.{suggest_name(name, sets)}"
        )
    one = sets[name]
    known = list(map(str, one.metrics))
    if one.own.function is None and metric not in known and "/" not in metric:
        raise ConfigError(
            f"{setting}={named}: the set `{name}` does not measure `{metric}`; it measures "
            f"{', '.join(known)}. Set {one.setting}.metrics.{suggest_name(metric, known)}"
        )
    return one.every


EVALUATION_CHECKS = (
    _check_evaluated_program,
    _check_sets,
    _check_baseline,
    _check_stop,
    _check_best,
    _check_tripwires,
)

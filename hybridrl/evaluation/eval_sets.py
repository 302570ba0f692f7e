"""The sets of `eval.sets` with all omitted settings resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from hybridrl.config.eval_schema import INHERITED_DATA_SETTINGS, EvalSetConfig
from hybridrl.config.role_models import check_group_names, parse_group
from hybridrl.config.schema import Config, DataConfig, RewardConfig
from hybridrl.config.setting import Setting
from hybridrl.config.task_settings import without_task
from hybridrl.errors import ConfigError, ErrorCollector, suggest_name

HELD_OUT_SET = "held_out"
"""What the job's own held-out rows are called among the sets."""
_RESERVED_NAMES = (
    HELD_OUT_SET,
    "loss",
    "pair_accuracy",
    "pair_margin",
    "label_accuracy",
    "label_margin",
)
"""Names that figures of evaluations have already."""
SAMPLE_METRICS = ("accuracy", "score", "length", "truncated")
AT_K_METRICS = ("mean", "pass", "maj")
OF_TRAINING = (
    *("eval_path", "eval_split", "response_column", "messages_column", "chosen_column"),
    *("rejected_column", "margin_column", "ranked_column", "scores_column", "ranked_pairs"),
    *("label_column", "task_column", "max_response_tokens", "prompts_per_step", "shuffle"),
    *("sampler", "sampler_options", "sources", "learn", "order", "max_shuffle_error"),
)
"""Settings of `data` that say nothing of prompts to evaluate on."""
_INHERITED_REWARD_SETTINGS = (
    *("processes", "timeout_s", "on_error", "error_value", "correct_at", "env"),
)
"""Settings of `reward` that a set has from the job where it says nothing."""
_SET_REWARD_SETTINGS = ("function", "options", "weights", *_INHERITED_REWARD_SETTINGS)
"""Settings of `reward` that a set may have."""


class EvalMetric(NamedTuple):
    """A metric of an evaluation set, one of `SAMPLE_METRICS`, or of `AT_K_METRICS` with its k."""

    kind: str
    k: int = 0

    def __str__(self) -> str:
        return f"{self.kind}@{self.k}" if self.k else self.kind

    @classmethod
    def parse(cls, name: str) -> EvalMetric | None:
        """Return the metric of this name; None if none that is computed from samples has it."""
        if name in SAMPLE_METRICS:
            return cls(name)
        kind, _, k = name.partition("@")
        return cls(kind, int(k)) if kind in AT_K_METRICS and k.isdecimal() and int(k) else None


@dataclass(frozen=True)
class ResolvedEvalSet:
    """An evaluation set with all its settings resolved.

    Attributes:
        own: What the settings say of it.
        data: Where its prompts come from; None: they are the job's held-out ones.
        reward: How it is scored.
        is_verified: Whether functions of its own score it, in place of all that scores for the job.
        metrics: What is measured of its answers.
        prompts, every: As the job says where the set says nothing.
    """

    name: str
    own: EvalSetConfig
    data: DataConfig | None
    reward: RewardConfig
    is_verified: bool
    metrics: tuple[EvalMetric, ...]
    prompts: int
    every: int

    @property
    def setting(self) -> Setting:
        """The set's setting, `eval.sets.<name>`."""
        return Setting("eval.sets") / self.name

    @property
    def is_greedy(self) -> bool:
        """True if one greedy response to each prompt is enough."""
        return self.own.samples == 1 and not self.own.temperature

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether the set is evaluated after this step; step 0 is before the first.

        Args:
            last: It is the last step.
        """
        return (
            self.own.at_start if step == 0 else bool(self.every and step % self.every == 0)
        ) or (last and self.own.at_end)


def resolve_eval_sets(config: Config) -> dict[str, ResolvedEvalSet]:
    """Resolve all sets, by name.

    Raises:
        ConfigError: for a name or a value that is none.
    """
    found, problems = {}, ErrorCollector()
    for name, read in config.eval.sets.items():
        if read is not None:
            with problems.noted():
                found[name] = _resolve_set(config, name, read)
    problems.raise_if_any()
    return found


def evaluates_held_out(config: Config, trains: bool) -> bool:
    """Return whether the job's own held-out rows are evaluated.

    Args:
        trains: Something is trained.
    """
    wanted = config.eval.held_out
    return (trains or not config.eval.sets) if wanted is None else wanted


def needs_held_out_rows(config: Config, trains: bool) -> bool:
    """Return whether anything is evaluated on held-out rows of the job's own data.

    Args:
        trains: Something is trained.
    """
    sets = resolve_eval_sets(config).values()
    return evaluates_held_out(config, trains) or any(one.data is None for one in sets)


def _resolve_set(config: Config, name: str, read: Any) -> ResolvedEvalSet:
    setting = Setting("eval.sets") / name
    if not re.fullmatch(r"[\w-]+", str(name)) or name in _RESERVED_NAMES:
        raise ConfigError(
            f"{setting}: a set may not be called so. Its name is part of those of its figures and "
            f"files: take letters, digits, `_` and `-`, and none of {', '.join(_RESERVED_NAMES)}."
        )
    own = parse_group(setting, EvalSetConfig(), read)
    reward = _resolve_reward(config, setting, own.reward)
    is_verified = own.reward.get("function") is not None
    return ResolvedEvalSet(
        name,
        own,
        _resolve_data(config, setting, own.data),
        reward,
        is_verified,
        () if own.function else _resolve_metrics(setting, own),
        own.prompts or config.eval.prompts,
        config.eval.every if own.every is None else own.every,
    )


def _resolve_data(config: Config, setting: str, read: Mapping[str, Any]) -> DataConfig | None:
    if not read:
        return None
    known = [f.name for f in fields(DataConfig) if f.name not in OF_TRAINING]
    check_group_names(f"{setting}.data", read, known)
    if not set(read) - set(INHERITED_DATA_SETTINGS):
        raise ConfigError(
            f"{setting}.data says how prompts are read, but not where they are. Set "
            f"{setting}.data.path=<file>, or {setting}.data.task=<task>; or leave {setting}.data "
            "out, and the set has the job's held-out prompts."
        )
    job = without_task(config).data  # whose limits are not those of other rows
    inherited = {name: getattr(job, name) for name in INHERITED_DATA_SETTINGS}
    data = parse_group(f"{setting}.data", replace(DataConfig(), **inherited), read)
    if data.task is not None and data.path is not None:
        raise ConfigError(
            f"Both {setting}.data.task={data.task} and {setting}.data.path={data.path} are set. "
            "Leave one of them out."
        )
    return data


def _resolve_reward(config: Config, setting: str, read: Mapping[str, Any]) -> RewardConfig:
    for model in ("model", "judge", "model_weight"):
        if model in read:
            raise ConfigError(
                f"{setting}.reward.{model}: a set is scored by functions of its own, or as the "
                f"job is. Set {setting}.reward.function, or leave {setting}.reward out."
            )
    check_group_names(f"{setting}.reward", read, _SET_REWARD_SETTINGS)
    if not read.get("function") and (alone := set(read) - {"function", "correct_at"}):
        raise ConfigError(
            f"{setting}.reward.{min(alone)} is about functions of the set's own, and there are "
            f"none: set {setting}.reward.function, too."
        )
    if read.get("function") is None:
        job = replace(config.reward, function="exact")  # it may hold functions
        own = {key: value for key, value in read.items() if key != "function"}
        correct_at = parse_group(f"{setting}.reward", job, own).correct_at
        return replace(config.reward, correct_at=correct_at)
    of_job = {name: getattr(config.reward, name) for name in _INHERITED_REWARD_SETTINGS}
    return parse_group(f"{setting}.reward", replace(RewardConfig(), **of_job), read)


def _resolve_metrics(setting: str, own: EvalSetConfig) -> tuple[EvalMetric, ...]:
    """Resolve the set's metrics; see `EvalSetConfig.metrics`.

    Raises:
        ConfigError: for a metric that is not known, or that the set's samples cannot give.
    """
    k = own.samples
    if k > 1 and own.temperature == 0:
        raise ConfigError(
            f"{setting}.temperature=0 with {setting}.samples={k}: all {k} samples of a prompt "
            f"would be the same. Set a temperature above 0, or {setting}.samples=1."
        )
    if own.metrics is None:
        at_k = (EvalMetric("mean", k), EvalMetric("pass", k)) if k > 1 else (EvalMetric("mean", 1),)
        first = at_k if k > 1 or own.temperature else (EvalMetric("accuracy"),)
        return (*first, EvalMetric("score"), EvalMetric("length"))
    listed = [own.metrics] if isinstance(own.metrics, str) else list(own.metrics)
    if not listed:
        raise ConfigError(
            f"{setting}.metrics=[]: nothing would be measured. Name a metric, such as accuracy, or "
            f"leave {setting}.metrics out."
        )
    return tuple(dict.fromkeys(_parse_metric(setting, str(name), k) for name in listed))


def _parse_metric(setting: str, name: str, samples: int) -> EvalMetric:
    found = EvalMetric.parse(f"{name[:-1]}{samples}" if name.endswith("@k") else name)
    if found is None:
        known = [*SAMPLE_METRICS, *(f"{kind}@k" for kind in AT_K_METRICS)]
        raise ConfigError(
            f"{setting}.metrics has `{name}`; there are {', '.join(known)}, with a number for k."
            f"{suggest_name(name, known)}"
        )
    if found.k > samples:
        raise ConfigError(
            f"{setting}.metrics has `{name}`, which needs {found.k} samples of each prompt, and "
            f"{setting}.samples={samples}. Set {setting}.samples={found.k} or more."
        )
    return found

"""The schema of evaluations: sets, metrics, early stopping."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    NameOrNames,
    NameOrPath,
    NonNegativeFloat,
    NonNegativeInt,
    NumberRange,
    PositiveInt,
    Probability,
)

_WITH_EVAL_SETS = AppliesIf("eval.sets")
_WITH_STOP_METRIC = AppliesIf(".metric")

INHERITED_DATA_SETTINGS = (
    *("prompt_column", "answer_column", "chat", "system_prompt", "max_prompt_tokens"),
    *("too_long", "answer_format", "bad_rows", "bad_rows_limit"),
    *("tools_column", "chat_template_options", "date"),
)
"""Settings of `data` that a set has from the job where it says nothing."""


@dataclass
class EvalSetConfig:
    """The settings in which a set of `eval.sets` differs from the job:
    `eval.sets.math.data.path=math.jsonl` (docs/evaluation.md)."""

    data: dict[str, Any] = field(default_factory=dict)
    """Where its prompts come from, by the names of `data`: `data.path`, `data.split`, `data.task`;
    columns and chat settings are the job's where nothing is said. Nothing at all: the job's own
    held-out prompts."""
    reward: dict[str, Any] = field(default_factory=dict)
    """How its responses are scored, by the names of `reward`: `reward.function`, `reward.options`,
    `reward.weights`, `reward.correct_at`; null: as the job's."""
    function: NameOrPath | None = None
    """An evaluation of yours in place of the set's own, `path/to/file.py:name`."""
    prompts: PositiveInt | None = None
    """Most prompts, drawn by `run.seed`; null: `eval.prompts`."""
    every: NonNegativeInt | None = None
    """Steps between two evaluations; 0: none between start and end; null: `eval.every`."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples: PositiveInt = 1
    """Answers to each prompt."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy; null: greedy where `samples` is 1, else `rollout.temperature`."""
    top_p: Annotated[float, NumberRange(above=0, most=1)] | None = None
    """Null: `rollout.top_p`."""
    top_k: NonNegativeInt | None = None
    """Null: `rollout.top_k`."""
    min_p: Probability | None = None
    """Null: `rollout.min_p`."""
    max_tokens: PositiveInt | None = None
    """Longest response; null: `rollout.max_tokens`."""
    metrics: Annotated[Any, NameOrNames()] = None
    """A list of `accuracy` (of greedy responses), `mean@k`, `pass@k`, `maj@k` (a number for k, or k
    itself for `samples`), `score`, `length` and `truncated`; null: those that its samples give."""
    extract: NameOrPath | None = None
    """What of a response is the answer, for `maj@k`: `boxed`, `number`, `text`, or a regular
    expression with a group; null: what the reward function compares, else `text`."""
    by_column: NameOrPath | None = None
    """A column of the set's data: each metric is also shown for each of its values."""


@dataclass
class EvalStopConfig:
    """Early stopping: the conditions on evaluations that end a run before `trainer.steps`, without
    an error."""

    metric: Annotated[NameOrPath | None, AppliesIf("eval.stop.metric")] = None
    """A figure of the evaluations, such as `accuracy` or `eval/math/pass@8`, or `-eval/loss` where
    less is better; null: it does not."""
    patience: Annotated[PositiveInt | None, _WITH_STOP_METRIC] = None
    """After so many evaluations in a row that were not better than the best; null: not for that."""
    least: Annotated[NonNegativeFloat, _WITH_STOP_METRIC] = 0.0
    """What is better by no more than this is not better."""
    target: Annotated[float | None, _WITH_STOP_METRIC] = None
    """When the figure is as good as this; null: not for that."""


@dataclass
class EvalConfig:
    """Evaluation of held-out prompts by greedy responses, and of further sets."""

    every: NonNegativeInt = 20
    """Steps between evaluations; 0: only before the first step and after the last."""
    prompts: PositiveInt = 256
    """Most held-out prompts."""
    samples: PositiveInt = 1
    """k of mean@k and pass@k, measured besides when it is more than 1."""
    by_column: Annotated[NameOrPath | None, AppliesIf("data.path")] = None
    """A column of the data, such as `source`: each figure of the evaluation is also shown for each
    of its values."""
    held_out: Annotated[bool | None, _WITH_EVAL_SETS] = None
    """Whether the job's own held-out rows are evaluated beside the sets; null: where something is
    trained."""
    sets: Annotated[dict[str, Any], _WITH_EVAL_SETS] = field(default_factory=dict)
    """Further sets by their names, each with data, sampling, interval, metrics and reward of its
    own."""
    baseline: Annotated[NameOrPath | None, AppliesIf("eval.baseline")] = None
    """What is compared with: the `evaluations.json` of another run, or the run's folder; null: the
    run's own evaluation before its first step."""
    stop: EvalStopConfig = field(default_factory=EvalStopConfig)

"""Checks that rows have the columns that settings name, and fit the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.batch.batch import Batch, is_user_column
from hybridrl.config.schema import Config
from hybridrl.config.setting import Setting
from hybridrl.data.job_data import JobData
from hybridrl.data.prompt_loader import build_row_schedule
from hybridrl.data.samplers import BUILT_IN_SAMPLERS
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.rewards.rubrics import load_rubric, read_row_rubric
from hybridrl.trainers.distillation import group_rows_by_teacher
from hybridrl.trainers.teacher_prompt import TeacherPrompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_teacher_columns(config: Config, prompts: Batch) -> None:
    """Check `distillation.*` against the data's columns.

    Raises:
        ConfigError: for a template with a column that rows have not, or a row without a teacher.
    """
    settings = config.distillation
    if settings is None:
        return
    known = list(prompts.columns)
    template = TeacherPrompt.read(settings.teacher_prompt)
    for name in template.columns if template else ():
        if name not in known:
            raise ConfigError(
                f"distillation.teacher_prompt={settings.teacher_prompt}: there is no column "
                f"`{name}` in the data; a row has "
                f"{', '.join(filter(is_user_column, known))}.{suggest_name(name, known)}"
            )
    if settings.by is not None and settings.by in known:
        group_rows_by_teacher(prompts[settings.by], settings.by, list(config.models))


def check_rubrics(config: Config, prompts: Batch) -> None:
    """Read the rubrics of judges, from a file and from every row.

    Raises:
        ConfigError: names the file, or the column that is not there.
        DataError: names the row.
    """
    for group, scores in ((Setting("reward"), config.reward), (Setting("cost"), config.cost)):
        judge = group / "judge"
        if scores is None or scores.judge.path is None:
            continue
        if scores.judge.rubric is not None:
            load_rubric(scores.judge.rubric, judge / "rubric")
        column = scores.judge.rubric_column
        if column is not None and "prompt" in prompts.columns:
            if column not in prompts.columns:
                raise ConfigError(
                    f"{judge / 'rubric_column'}={column}: there is no such column in the data; a "
                    f"row has {', '.join(filter(is_user_column, prompts.columns))}."
                )
            for prompt, given in zip(prompts["prompt"], prompts[column], strict=True):
                read_row_rubric({"prompt": prompt, column: given}, column, judge / "rubric_column")


def check_eval_column(config: Config, held_out: Batch | None) -> None:
    """Check that the held-out rows have the column by which evaluations are grouped
    (`eval.by_column`).

    Raises:
        ConfigError: if it is not.
    """
    by = config.eval.by_column
    if by is None or held_out is None or by in held_out.columns:
        return
    raise ConfigError(
        f"eval.by_column is `{by}`, but the held-out rows have no such column; they have "
        f"{', '.join(held_out.columns)}.{suggest_name(by, held_out.columns)}"
    )


def check_normalization_column(config: Config, prompts: Batch) -> None:
    """Check that the data has the column by which rewards are normalized (`reward.normalise_by`).

    Raises:
        ConfigError: if it is not.
    """
    by = config.reward.normalise_by
    if by is None or by in prompts.columns:
        return
    raise ConfigError(
        f"reward.normalise_by is `{by}`, but the data has no such column; it has "
        f"{', '.join(prompts.columns)}.{suggest_name(by, prompts.columns)}"
    )


def check_sample_lengths(
    config: Config,
    kind: str,
    rows: JobData,
    model: PretrainedConfig | None,
    longest_evaluated: int = 0,
) -> None:
    """Check that the longest sample fits the model's context and a micro-batch.

    Raises:
        ConfigError: if it does not.
    """
    if model is None:
        return
    limit = getattr(model, "max_position_embeddings", None)
    setting = "rollout.max_tokens" if kind == "prompts" else "data.max_response_tokens"
    response = f"{setting}={rows.longest_response}" if kind == "prompts" else "its response"
    length = rows.longest_prompt + rows.longest_response
    wanted = (
        f"The longest sample has {length} tokens (a prompt of up to {rows.longest_prompt} and "
        f"{response})"
    )
    if limit is not None and length > limit:
        raise ConfigError(
            f"{wanted}, but the model takes {limit}. Lower {setting}, or leave long rows out "
            "with data.max_prompt_tokens and data.too_long=drop"
            f"{', or raise model.tiny.context' if config.model.path is None else ''}."
        )
    if limit is not None and longest_evaluated > limit:
        raise ConfigError(
            f"eval.sets: the longest prompt with its response has {longest_evaluated} tokens, "
            f"but the model takes {limit}. Lower max_tokens of that set."
        )
    parallel, budget = config.actor.parallel, config.actor.tokens_per_microbatch
    sharing = parallel.ring * parallel.ulysses  # ranks that take the budget each
    needed = -(-length * (2 if kind == "pairs" else 1) // sharing)
    if budget is not None and needed > budget:
        raise ConfigError(
            f"{wanted}, but actor.tokens_per_microbatch={budget}: a sample (or a pair) is "
            f"never cut. Raise actor.tokens_per_microbatch to {needed} or more, or lower "
            f"{setting}."
        )


def check_dealing(config: Config, prompts: Batch) -> None:
    """Refuse rows that a sampler, or a mixture, cannot deal out."""
    if config.data.sampler in BUILT_IN_SAMPLERS or config.data.sources:
        build_row_schedule(config, prompts)


ROW_CHECKS = (check_eval_column, check_dealing, check_normalization_column, check_sample_lengths)

"""The rows of a job: those that its settings name, or that were given as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hybridrl.batch.batch import Batch
from hybridrl.config.preference_schema import MetaConfig
from hybridrl.config.schema import Config, DataConfig, is_served
from hybridrl.data.datasets import check_eval_data_separate, load_rows
from hybridrl.data.environment_tasks import ENVIRONMENT_TASK, load_environment_tasks
from hybridrl.data.held_out import DataSplits
from hybridrl.data.mixture import load_mixture, parse_sources
from hybridrl.data.preference_pairs import split_pairs_into_samples
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.table_columns import table_of
from hybridrl.data.task_blocks import sort_by_task, split_tasks
from hybridrl.errors import ConfigError, DataError
from hybridrl.system.content_cache import find_cache_folder
from hybridrl.system.storage import explain_write_errors


@dataclass(frozen=True)
class JobData:
    """Tokenized data.

    Attributes:
        training, held_out: Of the kind that the trainer learns from.
        examples: Prompts with right responses; None where the data has none.
        longest_prompt, longest_response: In tokens; responses that are generated are as long as
            they may be.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None
    longest_prompt: int
    longest_response: int


def load_job_data(
    config: Config, kind: str, tokenizer: Any, *, trains: bool, held_out: int
) -> JobData:
    """Read and tokenize the data.

    Args:
        kind: `prompts`, `examples`, `pairs` or `responses`, as `Trainer.DATA` says.
        trains: Something is learned from it.
        held_out: How many rows to evaluate on.
    """

    def load(data: DataConfig, origin: RowOrigin, number: int) -> DataSplits:
        seed = config.run.seed
        return load_rows(kind, data, tokenizer, held_out=number, seed=seed, origin=origin)

    if trains:
        for source in parse_sources(config.data):
            check_eval_data_separate(source.data, source.setting)
        check_eval_data_separate(config.data)
    if config.data.task == ENVIRONMENT_TASK:
        found = _load_tasks(config, kind, tokenizer, held_out)
    elif config.data.sources:
        found = load_mixture(config.data, load, held_out)
    else:
        found = load(config.data, DATA, held_out)
    training, kept, examples = found
    if kind == "pairs" and config.data.task_column is not None:
        drop = config.data.bad_rows == "drop"
        training = sort_by_task(training, drop, find_cache_folder(config.cache) / "tasks")
        if not len(training):
            raise DataError("No task (data.task_column) has two pairs or more to learn from.")
        if kept is not None:
            meta, kept = config.meta or MetaConfig(), sort_by_task(kept, drop=True)
            kept = split_tasks(kept, meta, config.run.seed) if len(kept) else None
    if kind == "pairs" and kept is not None:
        kept = split_pairs_into_samples(kept)
    batches = [training] if kept is None else [training, kept]
    prompt, response = longest(batches, "prompt_ids"), config.rollout.max_tokens
    if kind != "prompts":
        response = longest(batches, "response_ids", "chosen_ids", "rejected_ids")
    elif is_served(config.rollout, config.environment):
        prompt = config.data.max_prompt_tokens  # a conversation grows beyond the row's prompt
    return JobData(training, kept, examples, prompt, response)


def _load_tasks(config: Config, kind: str, tokenizer: Any, held_out: int) -> DataSplits:
    if kind != "prompts":
        raise ConfigError(
            f"data=environment with trainer.name={config.trainer.name}, which learns from {kind}: "
            "tasks of an environment have none. Take other data."
        )
    how = {"held_out": held_out, "seed": config.run.seed}
    return load_environment_tasks(config.data, config.environment, tokenizer, **how)


def longest(batches: Sequence[Batch], *names: str) -> int:
    """The longest row of these columns, in tokens."""
    lengths = [b.lengths(name) for b in batches for name in names if name in b.columns]
    return max(int(found.max()) for found in lengths)


def with_rows(config: Config, rows: Any, folder: Path) -> Config:
    """Write rows that were given as objects to `data.parquet`, where workers and later runs find
    them, and return the settings that name it.

    Args:
        rows: A list of dictionaries, a `datasets.Dataset`, or a `Batch`.

    Raises:
        ConfigError: if they are none of these.
    """
    if isinstance(rows, Batch):
        table = rows.table
    elif hasattr(rows, "with_format") and hasattr(rows, "column_names"):  # a datasets.Dataset
        table = rows.with_format("arrow")[:]
    elif isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        table = table_of(rows, "Job(data=...): the values of a column must be of one kind")
    else:
        raise ConfigError(
            f"Job(data=...) is a {type(rows).__name__}; it must be a list of dictionaries with at "
            "least one row, a datasets.Dataset, or a hybridrl.Batch."
        )
    file = folder / "data.parquet"
    with explain_write_errors(file):
        pq.write_table(table, file)
    return replace(config, data=replace(config.data, path=str(file.absolute())))

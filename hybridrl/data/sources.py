"""From the data settings to prompts, examples or pairs: a built-in task, files, or the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from hybridrl.config.schema import DataConfig
from hybridrl.core.batch import Batch
from hybridrl.data.files import read_rows
from hybridrl.data.preferences import tokenize_pairs
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.supervised import tokenize_conversations, tokenize_examples, tokenize_turns
from hybridrl.data.tasks import load_task, task_names
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_HELD_OUT_SHARE = 0.2
"""Of a file from which held-out rows are cut off."""


class Prompts(NamedTuple):
    """Tokenized prompts.

    Attributes:
        training: To learn from.
        held_out: To evaluate on; None if the data is too small to spare any.
        examples: Prompts with right answers, of a built-in task; None otherwise.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None


class Split(NamedTuple):
    """Rows to learn from, and rows to evaluate on (None if the data is too small to spare any)."""

    training: Batch
    held_out: Batch | None


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, held_out: int, seed: int
) -> Prompts:
    """Reads and tokenizes the prompts that `config` names.

    Args:
        held_out: How many prompts to evaluate on.
        seed: Of a built-in task's problems.

    Raises:
        DataError: for a missing file or column, a malformed row, or no rows at all.
        ConfigError: for settings that contradict each other or the tokenizer.
    """
    task = config.task is not None
    prompt_column = "prompt" if task else _prompt_column(config)
    answer_column = "answer" if task else config.answer_column
    required = {"data.prompt_column": prompt_column}
    if answer_column is not None:
        required["data.answer_column"] = answer_column

    def tokenized(rows: pa.Table) -> Batch:
        return tokenize_prompts(
            rows,
            tokenizer,
            prompt_column=prompt_column,
            answer_column=answer_column,
            chat=config.chat,
            system_prompt=config.system_prompt,
            max_prompt_tokens=config.max_prompt_tokens,
            too_long=config.too_long,  # type: ignore[arg-type]
        )

    split = _load(config, "problems", required, tokenized, held_out, seed)
    examples = None
    if task:
        examples = load_examples(config, tokenizer, held_out=held_out, seed=seed).training
    return Prompts(split.training, split.held_out, examples)


def load_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, held_out: int, seed: int
) -> Split:
    """Reads and tokenizes the examples for supervised fine-tuning: of a built-in task its problems
    with their answers, else `data.messages_column`, or prompts and responses.

    The arguments and errors are those of `load_prompts`, the columns those of `tokenize_examples`.
    """
    if config.task is not None and hasattr(load_task(config.task), "examples"):
        turns = partial(tokenize_turns, tokenizer=tokenizer)
        return _load(config, "examples", {}, turns, held_out, seed)
    if config.task is None and config.messages_column is not None:
        required = {"data.messages_column": config.messages_column}

        def tokenized(rows: pa.Table) -> Batch:
            return tokenize_conversations(
                rows,
                tokenizer,
                config.messages_column,  # type: ignore[arg-type]
                system_prompt=config.system_prompt,
                **_limits(config),
            )

    else:
        task = config.task is not None
        columns = ("prompt", "answer") if task else (_prompt_column(config), config.response_column)
        settings = ("data.prompt_column", "data.response_column")
        required = dict(zip(settings, columns, strict=True))

        def tokenized(rows: pa.Table) -> Batch:
            return tokenize_examples(
                rows,
                tokenizer,
                *columns,
                chat=config.chat,
                system_prompt=config.system_prompt,
                **_limits(config),
            )

    return _load(config, "problems", required, tokenized, held_out, seed)


def load_pairs(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, held_out: int, seed: int
) -> Split:
    """Reads and tokenizes preference pairs.

    The arguments and errors are those of `load_prompts`, the columns those of `tokenize_pairs`.
    """
    task = config.task is not None
    prompt_column = "prompt" if task else config.prompt_column
    chosen_column, rejected_column = (
        ("chosen", "rejected") if task else (config.chosen_column, config.rejected_column)
    )
    margin_column = None if task else config.margin_column
    # The prompt may stand in the conversations instead; `tokenize_pairs` finds out.
    required = {"data.chosen_column": chosen_column, "data.rejected_column": rejected_column}
    if margin_column is not None:
        required["data.margin_column"] = margin_column

    def tokenized(rows: pa.Table) -> Batch:
        return tokenize_pairs(
            rows,
            tokenizer,
            prompt_column,
            chosen_column,
            rejected_column,
            margin_column=margin_column,
            chat=config.chat,
            system_prompt=config.system_prompt,
            **_limits(config),
        )

    return _load(config, "pairs", required, tokenized, held_out, seed)


def _load(
    config: DataConfig,
    of_task: str,
    required: Mapping[str, str],
    tokenized: Callable[[pa.Table], Batch],
    held_out: int,
    seed: int,
) -> Split:
    """Rows of the task's function `of_task` or of files, tokenized."""
    if config.task is not None:
        rows = _function_of_task(config.task, of_task)(count_held_out=held_out, seed=seed)
        training, kept = (pa.Table.from_pylist(part) for part in rows)
        return Split(tokenized(training), tokenized(kept) if len(kept) else None)
    batch = tokenized(_read(config.path, config.split, required))
    if config.eval_path:
        kept = _read(config.eval_path, config.eval_split, required)[:held_out]
        return Split(batch, tokenized(kept) if len(kept) else None)
    spared = min(held_out, int(LARGEST_HELD_OUT_SHARE * len(batch)))
    cut = len(batch) - spared
    return Split(batch.slice(0, cut), batch.slice(cut, len(batch)) if spared else None)


def _function_of_task(name: str, function: str) -> Callable[..., Any]:
    task = load_task(name)
    if not hasattr(task, function):
        others = [known for known in task_names() if hasattr(load_task(known), function)]
        raise ConfigError(
            f"`data.task` is `{name}`, which has no preference pairs: a trainer that learns from "
            f"preferences needs a task with a function `{function}(count_held_out, seed)` "
            f"({', '.join(others)}), or pairs from a file: data=jsonl data.path=<file>."
        )
    return getattr(task, function)  # type: ignore[no-any-return]


def _prompt_column(config: DataConfig) -> str:
    if config.prompt_column is None:
        raise ConfigError(
            "`data.prompt_column` is null, which only preference pairs allow. Set it to the column "
            "of the prompts, or `data.messages_column` to that of the conversations to learn."
        )
    return config.prompt_column


def _limits(config: DataConfig) -> dict[str, Any]:
    names = ("max_prompt_tokens", "max_response_tokens", "too_long")
    return {name: getattr(config, name) for name in names}


def _read(path: str | None, split: str | None, required: Mapping[str, str]) -> pa.Table:
    assert path is not None  # `checks.settings` asks for a task or a path
    return read_rows(path, split, required=required)

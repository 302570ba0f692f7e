"""From the data settings to prompts: a built-in task, files, or a data set on the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from hybridrl.config.schema import DataConfig
from hybridrl.core.batch import Batch
from hybridrl.data.files import read_rows
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.supervised import tokenize_examples
from hybridrl.data.tasks import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_HELD_OUT_SHARE = 0.2
"""Of a file from which held-out prompts are cut off."""


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


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, held_out: int, seed: int
) -> Prompts:
    """Reads and tokenizes what `config` names.

    Args:
        held_out: How many prompts to evaluate on.
        seed: Of a built-in task's problems.

    Raises:
        DataError: for a missing file or column, a malformed row, or no rows at all.
    """
    examples = None
    if config.task is not None:
        problems = load_task(config.task).problems(count_held_out=held_out, seed=seed)
        training, kept = (pa.Table.from_pylist(rows) for rows in problems)
        examples = tokenize_examples(training, tokenizer, "prompt", "answer")
        columns = ("prompt", "answer")
    else:
        columns = (config.prompt_column, config.answer_column)
        training = _read(config, config.path, config.split)
        if config.eval_path:
            kept = _read(config, config.eval_path, config.eval_split)[:held_out]
        else:
            spared = min(held_out, int(LARGEST_HELD_OUT_SHARE * len(training)))
            cut = len(training) - spared
            training, kept = training[:cut], training[cut:]

    def tokenized(rows: pa.Table) -> Batch:
        return tokenize_prompts(
            rows,
            tokenizer,
            prompt_column=columns[0],
            answer_column=columns[1],
            chat=config.chat,
            system_prompt=config.system_prompt,
            max_prompt_tokens=config.max_prompt_tokens,
            too_long=config.too_long,
        )

    return Prompts(tokenized(training), tokenized(kept) if len(kept) else None, examples)


def _read(config: DataConfig, path: str, split: str | None) -> pa.Table:
    required = {"data.prompt_column": config.prompt_column}
    if config.answer_column is not None:
        required["data.answer_column"] = config.answer_column
    return read_rows(path, split, required=required)

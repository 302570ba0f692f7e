"""An environment's own tasks as training prompts (`data=environment`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig, EnvironmentConfig
from hybridrl.data.held_out import MAX_HELD_OUT_SHARE, DataSplits
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.data.table_columns import table_of
from hybridrl.environments.environment_pool import EnvironmentPool
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT_TASK = "environment"
"""The value of `data.task` that stands for them."""
refuse_missing_environment = (
    "data=environment needs environment.name, the environment whose tasks they are. See "
    "docs/environments.md."
)


def load_environment_tasks(
    config: DataConfig,
    environment: EnvironmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    seed: int,
) -> DataSplits:
    """Ask the environment for its tasks and tokenize their prompts.

    The tokens are those of the prompt's text alone; the environment's program decides what the
    model reads in an episode.

    Raises:
        ConfigError: if the environment has no tasks.
        DataError: if a prompt is too long.
    """
    if environment.name is None:
        raise ConfigError(refuse_missing_environment)
    training, kept = list_environment_tasks(environment, held_out, seed)

    def tokenized(rows: Sequence[dict[str, Any]]) -> Batch:
        complaint = "gave tasks whose columns are not of one kind each"
        table = table_of(rows, f"environment.name={environment.name} {complaint}")
        how = DataConfig(
            max_prompt_tokens=config.max_prompt_tokens,
            chat_template_options=config.chat_template_options,
            date=config.date,
        )
        answers = "answer" if "answer" in table.column_names else None
        return tokenize_prompts(RowReader(tokenizer, how), table, "prompt", answers)

    return DataSplits(tokenized(training), tokenized(kept) if kept else None)


def list_environment_tasks(
    config: EnvironmentConfig, count_held_out: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ask the environment for its tasks, and split them into rows to learn from and rows to
    evaluate on.

    Args:
        count_held_out: How many to evaluate on; fewer if the environment has few.
        seed: Of their draw.

    Returns:
        Rows to learn from, at most `environment.tasks`, and rows to evaluate on. Each has a
        `prompt`, a text, and what the environment needs to play it.

    Raises:
        ConfigError: if there are none, or they are no rows.
    """
    with closing(EnvironmentPool(config)) as pool:
        rows = pool.rows(config.tasks + count_held_out)
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None or not rows:
        shown = f"a task that is {wrong!r:.100}" if rows else "no tasks"
        raise ConfigError(
            f"environment.name={config.name} gave {shown}, expected dictionaries, one for each "
            "episode."
        )
    number = min(count_held_out, int(MAX_HELD_OUT_SHARE * len(rows)))
    if len(rows) == config.tasks + count_held_out:
        number = count_held_out
    held_out = set(random.Random(seed).sample(range(len(rows)), number))
    # A prompt of no characters has no tokens; programs that open a conversation themselves may
    # have none.
    rows = [row | {"prompt": str(row.get("prompt") or "\n")} for row in rows]
    kept = [row for number, row in enumerate(rows) if number in held_out]
    return [row for number, row in enumerate(rows) if number not in held_out], kept

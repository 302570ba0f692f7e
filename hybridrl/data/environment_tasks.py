"""An environment's own tasks as training prompts (`data=environment`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig, EnvironmentConfig
from hybridrl.data.held_out import DataSplits
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.data.table_columns import table_of
from hybridrl.environments.rows import list_environment_tasks
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

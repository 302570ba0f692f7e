"""Loading prompts, examples or pairs as the settings name them: a built-in task, files or the
hub."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.config.setting import Setting
from hybridrl.data.block_program import RowRecipe
from hybridrl.data.data_files import TRAIN_SPLIT, find_rows, list_splits, read_found_rows
from hybridrl.data.held_out import DataSplits, sample_batch_rows, split_held_out
from hybridrl.data.labelled_responses import (
    tokenize_labelled_responses,
    tokenize_unpaired_responses,
)
from hybridrl.data.preference_pairs import tokenize_preference_pairs
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_blocks import estimate_large_size
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import (
    tokenize_conversations,
    tokenize_examples,
    tokenize_task_turns,
)
from hybridrl.data.table_columns import replace_column
from hybridrl.data.tasks import list_tasks, load_task
from hybridrl.data.token_cache import load_token_rows
from hybridrl.errors import ConfigError, HybridRLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK_ARGUMENTS = ("tasks", "task_options", "rows")
"""Settings that a task's functions get, if they have parameters of these names."""
NO_REFERENCE_ANSWER = "(no single answer)"
"""In place of the answer of a problem that many answers solve, which a verifier tells apart."""

_TASK_COLUMNS = {
    "prompt_column": "prompt",
    "answer_column": "answer",
    "response_column": "answer",
    "chosen_column": "chosen",
    "rejected_column": "rejected",
    "task_column": "annotator",
}
"""Keys of a task's rows, by the setting that names the column of files."""

_log = logging.getLogger(__name__)


class _RowKind(NamedTuple):
    """A description of how rows of one kind are read.

    Attributes:
        of_task: The task's function that makes its rows; they pass through `prepare`.
        tokenize: Called with a reader, the rows and `columns`, by the names of their settings.
        optional: Settings whose column the files may lack.
    """

    of_task: str
    tokenize: Callable[..., Batch]
    columns: Mapping[str, str | None]
    optional: Sequence[str] = ()
    prepare: Callable[[pa.Table], pa.Table] = lambda rows: rows


def load_rows(
    kind: str,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    seed: int,
    origin: RowOrigin = DATA,
) -> DataSplits:
    """Read and tokenize the rows that `config` names.

    Args:
        kind: What is learned from, see `Trainer.DATA`: `prompts`, whose columns are those of
            `tokenize_prompts`; `examples`, a task's problems with their answers,
            `data.messages_column`, or prompts with responses (`tokenize_examples`); `pairs`
            (`tokenize_preference_pairs`); or `responses` that are marked as good or bad
            (`tokenize_labelled_responses`).
        held_out: Number of rows to evaluate on.
        seed: Draws the held-out rows, and the problems of a built-in task.

    Raises:
        DataError: for a missing file or column, a malformed row, or no rows at all.
        ConfigError: for settings that contradict each other or the tokenizer.
    """

    def load(kind: str) -> DataSplits:
        how = _ROW_KINDS[kind](config, origin)
        return _load_splits(config, origin, tokenizer, held_out, seed, how)

    found = load(kind)
    if kind != "prompts" or config.task is None:
        return found
    if set(found.training["answer"]) <= {NO_REFERENCE_ANSWER}:
        return found
    return found._replace(examples=load("examples").training)


def load_eval_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    number: int,
    seed: int,
    origin: RowOrigin = DATA,
) -> Batch:
    """Load prompts for evaluation only: a task's held-out problems, the evaluation split of a
    folder, or all rows of other data.

    Args:
        number: Maximum number of prompts; they are drawn if there are more.
        seed: Of the draw, and of a built-in task's problems.

    Raises:
        DataError, ConfigError: as `load_rows` does.
    """
    holds_out = config.task is not None or _find_eval_split(config)[0] is not None
    held_out = number if holds_out else 0
    found = load_rows("prompts", config, tokenizer, held_out=held_out, seed=seed, origin=origin)
    rows = found.training if found.held_out is None else found.held_out
    return sample_batch_rows(rows, number, seed)


def _load_splits(
    config: DataConfig,
    origin: RowOrigin,
    tokenizer: PreTrainedTokenizerBase,
    held_out: int,
    seed: int,
    how: _RowKind,
) -> DataSplits:
    """Load and tokenize rows of files, or of a task."""
    _check_file_settings(config, origin)

    def tokenized(rows: pa.Table, refused: RefusedRows) -> Batch:
        return how.tokenize(RowReader(tokenizer, config, refused), rows, **how.columns)

    if config.task is not None:
        training, kept = map(
            how.prepare, _make_task_rows(config, origin, how.of_task, held_out, seed)
        )
        refused = RefusedRows(origin=origin)
        held_out_rows = tokenized(kept, refused) if len(kept) else None
        return DataSplits(tokenized(training, refused), held_out_rows)
    eval_path, eval_split = _find_eval_split(config)
    required: dict[str, str] = {
        origin / name: column
        for name, column in how.columns.items()
        if column is not None and name not in how.optional
    }

    def made(path: str, split: str | None, origin: RowOrigin = origin) -> Batch:
        recipe = RowRecipe(config, origin, path, how.tokenize, how.columns, required)
        found = find_rows(path, split, origin)
        if size := estimate_large_size(found):
            rows = load_token_rows(recipe, found, size, tokenizer)
            if rows is not None:
                return rows
        refused = recipe.refused()
        batch = recipe.make(partial(read_found_rows, found, path), tokenizer, refused)
        refused.tell()
        return batch

    batch = made(str(config.path), config.split)
    if eval_path is None:
        return split_held_out(batch, held_out, seed)
    if config.eval_path is not None:
        rows = f"`{origin / 'eval_path'}`"
        origin = origin._replace(rows=rows, is_eval_path=True)
    others = made(eval_path, eval_split, origin)
    return DataSplits(batch, sample_batch_rows(others, held_out, seed) if held_out else None)


def _read_prompts(config: DataConfig, origin: RowOrigin) -> _RowKind:
    columns = _name_columns(config, "prompt_column", "answer_column")
    _check_prompt_column(columns, origin, "")
    return _RowKind("problems", tokenize_prompts, columns, prepare=_fill_missing_answers)


def _read_examples(config: DataConfig, origin: RowOrigin) -> _RowKind:
    if config.task is not None and hasattr(load_task(config.task, origin / "task"), "examples"):
        return _RowKind("examples", tokenize_task_turns, {})
    conversations = _name_columns(config, "messages_column")
    if conversations["messages_column"] is not None:
        return _RowKind("problems", tokenize_conversations, conversations)
    columns = _name_columns(config, "prompt_column", "response_column")
    or_messages = f", or `{origin / 'messages_column'}` to that of the conversations to learn"
    _check_prompt_column(columns, origin, or_messages)
    return _RowKind("problems", tokenize_examples, columns, prepare=_select_answered)


def _read_pairs(config: DataConfig, origin: RowOrigin) -> _RowKind:
    named = ["prompt_column", "chosen_column", "rejected_column", "margin_column"]
    columns = _name_columns(config, *named, "ranked_column", "scores_column")
    if columns["ranked_column"] is not None:
        columns |= dict.fromkeys(named[1:])
    if config.task_column is not None:
        columns |= _name_columns(config, "task_column")
    # The prompt may stand in the conversations instead; `tokenize_preference_pairs` finds out.
    return _RowKind("pairs", tokenize_preference_pairs, columns, optional=("prompt_column",))


def _read_responses(config: DataConfig, origin: RowOrigin) -> _RowKind:
    if config.task is not None or config.label_column is None:
        columns = _name_columns(config, "prompt_column", "chosen_column", "rejected_column")
        return _RowKind("pairs", tokenize_unpaired_responses, columns)
    columns = _name_columns(config, "prompt_column", "response_column", "label_column")
    _check_prompt_column(columns, origin, "")
    return _RowKind("pairs", tokenize_labelled_responses, columns)


_ROW_KINDS: Mapping[str, Callable[[DataConfig, RowOrigin], _RowKind]] = {
    "prompts": _read_prompts,
    "examples": _read_examples,
    "pairs": _read_pairs,
    "responses": _read_responses,
}


def _name_columns(config: DataConfig, *settings: str) -> dict[str, str | None]:
    """Return the columns that these settings name; a task's rows have columns of their own."""
    if config.task is not None:
        return {name: _TASK_COLUMNS.get(name) for name in settings}
    return {name: getattr(config, name) for name in settings}


def _check_prompt_column(
    columns: Mapping[str, str | None], origin: RowOrigin, otherwise: str
) -> None:
    """Refuse settings without a column of prompts; `otherwise` ends the error with an
    alternative."""
    if columns["prompt_column"] is None:
        raise ConfigError(
            f"`{origin / 'prompt_column'}` is null, which only preference pairs allow. Set it to "
            f"the column of the prompts{otherwise}."
        )


def _check_file_settings(config: DataConfig, origin: RowOrigin) -> None:
    """Refuse file settings that would be ignored, or that evaluate a policy on its training
    rows."""
    given = {
        f"{origin / name}={value}": name
        for name in ("split", "eval_path", "eval_split")
        if (value := getattr(config, name)) is not None
    }
    if config.task is not None and given:
        raise ConfigError(
            f"{next(iter(given))} is for data of files, and {origin / 'task'}={config.task} brings "
            "its own prompts to evaluate on. Leave it out, or set data=jsonl data.path=<file>."
        )
    if config.eval_path is None and config.eval_split is not None:
        raise ConfigError(
            f"{origin / 'eval_split'}={config.eval_split} needs {origin / 'eval_path'}, the file, "
            f"folder or data set that it is a split of. It may be that of {origin / 'path'}."
        )


def check_eval_data_separate(config: DataConfig, settings: Setting = DATA.settings) -> None:
    """Refuse to evaluate a policy on the rows it is trained on.

    Raises:
        ConfigError: names `eval_path` of these settings.
    """
    if config.eval_path is not None and config.eval_path == config.path:
        splits = [config.split or TRAIN_SPLIT, config.eval_split or TRAIN_SPLIT]
        if splits[0] == splits[1]:
            has_splits = not Path(config.eval_path).is_file()
            split = f"split by {settings / 'eval_split'}"
            raise ConfigError(
                f"{settings / 'eval_path'}={config.eval_path} is {settings / 'path'}: the policy "
                f"would be evaluated on what it learns. Leave {settings / 'eval_path'} out, and "
                f"rows are held out; or name another {split if has_splits else 'file'}."
            )


def _find_eval_split(config: DataConfig) -> tuple[str | None, str | None]:
    """Return path and split of the evaluation rows; None if they are held out of the training rows.

    A folder that has files of a split for that beside those of `train` is asked for them.
    """
    if config.eval_path is not None or config.split is not None:
        return config.eval_path, config.eval_split
    splits = list_splits(str(config.path))
    if len(splits) < 2 or splits[0] != TRAIN_SPLIT:
        return None, None
    _log.warning("Evaluations are on the split `%s` of `%s`.", splits[1], config.path)
    return config.path, splits[1]


def _make_task_rows(
    config: DataConfig, origin: RowOrigin, function: str, held_out: int, seed: int
) -> list[pa.Table]:
    """Call a task's function and return its rows to learn from and its rows to evaluate on."""
    name, setting = str(config.task), origin / "task"
    make = getattr(load_task(name, setting), function, None)
    if make is None:
        others = [known for known in list_tasks() if hasattr(load_task(known), function)]
        raise ConfigError(
            f"`{setting}` is `{name}`, which has no preference pairs: a trainer that learns from "
            f"preferences needs a task with a function `{function}(count_held_out, seed)` "
            f"({', '.join(others)}), or pairs from a file: data=jsonl data.path=<file>."
        )
    named = inspect.signature(make).parameters
    offered = {name: getattr(config, name) for name in TASK_ARGUMENTS if name in named}
    if "origin" in named:  # a task of the library makes its sentences of it
        offered["origin"] = origin
    try:
        training, kept = make(count_held_out=held_out, seed=seed, **offered)
        return [pa.Table.from_pylist(list(part)) for part in (training, kept)]
    except HybridRLError:
        raise
    except Exception as error:  # it is the user's
        raise ConfigError(
            f"`{setting}` is `{name}`, whose function `{function}(count_held_out, seed)` must "
            "return two lists of dictionaries, rows to learn from and rows to evaluate on: "
            f"{type(error).__name__}: {error}."
        ) from error


def _fill_missing_answers(rows: pa.Table) -> pa.Table:
    """Fill missing answers of a task's problems with a placeholder."""
    if "answer" not in rows.column_names or not rows.column("answer").null_count:
        return rows
    texts = rows.column("answer").cast(pa.string())
    return replace_column(rows, "answer", texts.fill_null(NO_REFERENCE_ANSWER))


def _select_answered(rows: pa.Table) -> pa.Table:
    """Return the problems of a task that have a reference answer.

    Raises:
        ConfigError: if none has.
    """
    if "answer" not in rows.column_names or not rows.column("answer").null_count:
        return rows
    found = rows.filter(pc.is_valid(rows.column("answer")))
    if rows.num_rows and not found.num_rows:
        raise ConfigError(
            "The problems of these tasks have no single right answer (a verifier tells which are "
            "right), so there is nothing to learn by imitation. Name other tasks."
        )
    return found

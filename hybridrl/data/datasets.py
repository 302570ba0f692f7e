"""Loading prompts, examples or pairs as the settings name them: a built-in task, files or the
hub."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import DataConfig
from hybridrl.config.setting import Setting
from hybridrl.data.answer_formats import extract_reference_answers
from hybridrl.data.data_files import TRAIN_SPLIT, list_splits, read_rows
from hybridrl.data.held_out import sample_batch_rows, split_held_out
from hybridrl.data.preference_pairs import tokenize_preference_pairs
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.refused_rows import RefusedRows, check_rows
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_examples import (
    tokenize_conversations,
    tokenize_examples,
    tokenize_task_turns,
)
from hybridrl.data.tasks import list_tasks, load_task
from hybridrl.errors import ConfigError, HybridRLError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK_ARGUMENTS = ("tasks", "task_options", "rows")
"""Settings that a task's functions get, if they have parameters of these names."""
NO_REFERENCE_ANSWER = "(no single answer)"
"""In place of the answer of a problem that many answers solve, which a verifier tells apart."""

_log = logging.getLogger(__name__)


class TokenizedPrompts(NamedTuple):
    """Tokenized rows to learn from, to evaluate on, and with reference responses.

    Attributes:
        training: To learn from.
        held_out: To evaluate on; None if the data is too small to spare any.
        examples: Prompts with right answers, of a built-in task; None otherwise.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None


class DataSplits(NamedTuple):
    training: Batch
    held_out: Batch | None


def load_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    seed: int,
    origin: RowOrigin = DATA,
) -> TokenizedPrompts:
    """Read and tokenize the prompts that `config` names.

    Args:
        held_out: How many prompts to evaluate on.
        seed: Of a built-in task's problems.

    Raises:
        DataError: for a missing file or column, a malformed row, or no rows at all.
        ConfigError: for settings that contradict each other or the tokenizer.
    """
    task = config.task is not None
    prompt_column = "prompt" if task else _require_prompt_column(config, origin, "")
    answer_column = "answer" if task else config.answer_column
    required = {origin / "prompt_column": prompt_column}
    if answer_column is not None:
        required[origin / "answer_column"] = answer_column
    tokenized = partial(tokenize_prompts, prompt_column=prompt_column, answer_column=answer_column)
    load = partial(_load_splits, config, origin, tokenizer, held_out, seed)
    split = load("problems", required, tokenized, _fill_missing_answers)
    examples = None
    if task and any(answer != NO_REFERENCE_ANSWER for answer in split.training["answer"]):
        examples = load_examples(
            config, tokenizer, held_out=held_out, seed=seed, origin=origin
        ).training
    return TokenizedPrompts(split.training, split.held_out, examples)


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
        number: The most; of more there are drawn so many.
        seed: Of the draw, and of a built-in task's problems.

    Raises:
        DataError, ConfigError: as `load_prompts` does.
    """
    holds_out = config.task is not None or _find_eval_split(config)[0] is not None
    found = load_prompts(
        config, tokenizer, held_out=number if holds_out else 0, seed=seed, origin=origin
    )
    rows = found.training if found.held_out is None else found.held_out
    return sample_batch_rows(rows, number, seed)


def load_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    seed: int,
    origin: RowOrigin = DATA,
) -> DataSplits:
    """Load and tokenize supervised examples: a task's problems with their answers,
    `data.messages_column`, or prompts with responses.

    The arguments and errors are those of `load_prompts`, the columns those of `tokenize_examples`.
    """
    load = partial(_load_splits, config, origin, tokenizer, held_out, seed)
    if config.task is not None and hasattr(load_task(config.task, origin / "task"), "examples"):
        return load("examples", {}, tokenize_task_turns)
    if config.task is None and config.messages_column is not None:
        required = {origin / "messages_column": config.messages_column}
        tokenized = partial(tokenize_conversations, messages_column=config.messages_column)
        return load("problems", required, tokenized, _select_answered)
    or_messages = f", or `{origin / 'messages_column'}` to that of the conversations to learn"
    prompt_column, response_column = "prompt", "answer"
    if config.task is None:
        prompt_column = _require_prompt_column(config, origin, or_messages)
        response_column = config.response_column
    required = {
        origin / "prompt_column": prompt_column,
        origin / "response_column": response_column,
    }
    tokenized = partial(
        tokenize_examples, prompt_column=prompt_column, response_column=response_column
    )
    return load("problems", required, tokenized, _select_answered)


def load_preference_pairs(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    held_out: int,
    seed: int,
    origin: RowOrigin = DATA,
) -> DataSplits:
    """Read and tokenize preference pairs.

    The arguments and errors are those of `load_prompts`, the columns those of
    `tokenize_preference_pairs`.
    """
    task = config.task is not None
    prompt_column = "prompt" if task else config.prompt_column
    chosen_column, rejected_column = (
        ("chosen", "rejected") if task else (config.chosen_column, config.rejected_column)
    )
    margin_column = None if task else config.margin_column
    # The prompt may stand in the conversations instead; `tokenize_preference_pairs` finds out.
    required = {
        origin / "chosen_column": chosen_column,
        origin / "rejected_column": rejected_column,
    }
    if margin_column is not None:
        required[origin / "margin_column"] = margin_column
    tokenized = partial(
        tokenize_preference_pairs,
        prompt_column=prompt_column,
        chosen_column=chosen_column,
        rejected_column=rejected_column,
        margin_column=margin_column,
    )
    return _load_splits(config, origin, tokenizer, held_out, seed, "pairs", required, tokenized)


def _load_splits(
    config: DataConfig,
    origin: RowOrigin,
    tokenizer: PreTrainedTokenizerBase,
    held_out: int,
    seed: int,
    of_task: str,
    required: Mapping[str, str],
    tokenized: Callable[[RowReader, pa.Table], Batch],
    prepared: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> DataSplits:
    """Load and tokenize rows of a task's function `of_task`, first passed through `prepared`, or of
    files."""
    _check_file_settings(config, origin)
    if config.task is not None:
        training, kept = map(prepared, _make_task_rows(config, origin, of_task, held_out, seed))
        parts = [
            tokenized(RowReader.of(config, tokenizer, RefusedRows(origin=origin)), rows)
            for rows in ([training, kept] if len(kept) else [training])
        ]
        return DataSplits(parts[0], parts[1] if len(kept) else None)
    path, (eval_path, eval_split) = str(config.path), _find_eval_split(config)
    answers = required.get(origin / "answer_column")
    texts = [] if answers is None else [answers]

    def made(path: str, split: str | None, origin: RowOrigin = origin) -> Batch:
        drop, limit = config.bad_rows == "drop", config.bad_rows_limit
        refused = RefusedRows(path, drop=drop, limit=limit, origin=origin)
        rows = read_rows(path, split, required=required, texts=texts, refused=refused)
        rows = extract_reference_answers(rows, config.answer_format, answers, refused)
        check_rows(config, rows, refused)
        batch = tokenized(RowReader.of(config, tokenizer, refused), rows)
        refused.tell()
        return batch

    batch = made(path, config.split)
    if eval_path is None:
        return DataSplits(*split_held_out(batch, held_out, seed))
    if config.eval_path is not None:
        rows = f"`{origin / 'eval_path'}`"
        origin = origin._replace(rows=rows, is_eval_path=True)
    others = made(eval_path, eval_split, origin)
    return DataSplits(batch, sample_batch_rows(others, held_out, seed) if held_out else None)


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
    None: they are held out of the others.

    A folder that has files of a split for that beside those of `train` is asked for them.
    """
    if config.eval_path is not None or config.split is not None:
        return config.eval_path, config.eval_split
    first, *others = list_splits(str(config.path)) or [None]
    if first != TRAIN_SPLIT or not others:
        return None, None
    _log.warning("Evaluations are on the split `%s` of `%s`.", others[0], config.path)
    return config.path, others[0]


def _make_task_rows(
    config: DataConfig, origin: RowOrigin, function: str, held_out: int, seed: int
) -> list[pa.Table]:
    """Call a task's function and return its rows to learn from and its rows to evaluate on."""
    name, setting = str(config.task), origin / "task"
    make = _find_task_function(setting, name, function)
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
    place = rows.column_names.index("answer")
    texts = rows.column("answer").cast(pa.string())
    return rows.set_column(place, "answer", texts.fill_null(NO_REFERENCE_ANSWER))


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


def _find_task_function(setting: Setting, name: str, function: str) -> Callable[..., Any]:
    task = load_task(name, setting)
    if not hasattr(task, function):
        others = [known for known in list_tasks() if hasattr(load_task(known), function)]
        raise ConfigError(
            f"`{setting}` is `{name}`, which has no preference pairs: a trainer that learns from "
            f"preferences needs a task with a function `{function}(count_held_out, seed)` "
            f"({', '.join(others)}), or pairs from a file: data=jsonl data.path=<file>."
        )
    return getattr(task, function)  # type: ignore[no-any-return]


def _require_prompt_column(config: DataConfig, origin: RowOrigin, otherwise: str) -> str:
    """Return the column of the prompts, which must be set; `otherwise` ends the error with an
    alternative."""
    if config.prompt_column is None:
        raise ConfigError(
            f"`{origin / 'prompt_column'}` is null, which only preference pairs allow. Set it to "
            f"the column of the prompts{otherwise}."
        )
    return config.prompt_column

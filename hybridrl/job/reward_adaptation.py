"""Adapting the reward model of a run with `algorithm=meta_reward_model` to a task: a reward model
with one output, as `reward.model` takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hybridrl.algorithms.meta_learning import InnerLoop
from hybridrl.batch.batch import Batch
from hybridrl.composition.load import load_run_config
from hybridrl.config.schema import Config, DataConfig
from hybridrl.data.datasets import load_rows
from hybridrl.data.task_blocks import number_task
from hybridrl.errors import ConfigError, DataError
from hybridrl.models.folder_checks import silence_transformers
from hybridrl.models.language_model import decoder_of
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.run_files.run_paths import MODEL, SETTINGS
from hybridrl.system.storage import explain_write_errors
from hybridrl.workers.meta_reward_worker import load_task_table


class AdaptedReward(NamedTuple):
    """A result of `adapt_reward_model`.

    Attributes:
        pairs: That it was adapted to.
        before, after: Share of them that the beginning and the adapted model tell right.
    """

    pairs: int
    before: float
    after: float


def adapt_reward_model(run: Path, pairs: str, folder: Path, task: str | None) -> AdaptedReward:
    """Write the reward model of a run, adapted to pairs, to a new folder.

    Args:
        run: The folder of the run, whose settings say how the pairs are read and adapted to.
        pairs: As `data.path`.
        task: A task of the run, from whose row of the table to begin; None: as a new one.

    Raises:
        ConfigError: if the run is of another algorithm or has no such task, or the folder is not
            empty.
        DataError: if the pairs cannot be read.
    """
    config = load_run_config(run / SETTINGS)
    if config.meta is None or not (run / MODEL / "config.json").is_file():
        raise ConfigError(
            f"{run} is no run of algorithm=meta_reward_model that has ended with a model, which "
            "are the ones that can be adapted."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, and is not empty. Name a new folder.")
    with silence_transformers():
        load = AutoModelForSequenceClassification.from_pretrained
        model = load(run / MODEL, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(run / MODEL))
    found = load_rows(
        "pairs", _read_as_new_data(config, pairs), tokenizer, held_out=0, seed=config.run.seed
    )
    _check_lengths(model, found.training, pairs)
    with explain_write_errors(folder, "FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
    differences = compute_differences(model, found.training)
    meta, tasks = config.meta, torch.zeros(len(differences), dtype=torch.int64)
    begin = _find_row(run, task, meta.features)[None]
    inner = InnerLoop(meta.inner_steps, meta.inner_rate)
    weights = inner.adapt(begin, differences, tasks).detach()
    before = inner._replace(steps=0).adapt(begin, differences, tasks).detach()
    fold_head(model, weights[0])
    dtype = config.model.save_dtype
    (model.to(getattr(torch, dtype)) if dtype else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shares = [float((differences @ w[0] > 0).float().mean()) for w in (before, weights)]
    return AdaptedReward(len(differences), *shares)


def _check_lengths(model: Any, rows: Batch, pairs: str) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    responses = np.maximum(rows.lengths("chosen_ids"), rows.lengths("rejected_ids"))
    most = int((rows.lengths("prompt_ids") + responses).max())
    if limit is not None and most > limit:
        raise DataError(
            f"The longest sample of {pairs} has {most} tokens, and the model takes {limit}. Leave "
            "such pairs out."
        )


@torch.no_grad()
def compute_differences(model: Any, pairs: Batch) -> Tensor:
    """Compute the features of the chosen response of each pair minus those of the rejected one,
    `[pairs, features]`."""

    def features(prompt: list[int], response: list[int]) -> Tensor:
        ids = torch.tensor([prompt + response], device=model.device)
        hidden = decoder_of(model)(input_ids=ids).last_hidden_state
        found: Tensor = model.score(hidden[0, -1])
        return found.float()

    rows = pairs.to_pylist()
    sides = ("chosen_ids", "rejected_ids")
    of_sides = [torch.stack([features(r["prompt_ids"], r[side]) for r in rows]) for side in sides]
    return of_sides[0] - of_sides[1]


@torch.no_grad()
def fold_head(model: Any, weights: Tensor) -> None:
    """Replace the head by the sum of its outputs with these weights, which is one output."""
    summed = (weights.to(model.score.weight) @ model.score.weight)[None]
    model.score = torch.nn.Linear(summed.shape[1], 1, bias=False)
    model.score.weight.data = summed
    model.config.num_labels = model.num_labels = 1


def _read_as_new_data(config: Config, pairs: str) -> DataConfig:
    others: dict[str, Any] = dict.fromkeys(("task_column", "eval_path", "split", "eval_split"))
    return replace(config.data, path=pairs, task=None, sources={}, **others)


def _find_row(run: Path, task: str | None, features: int) -> Tensor:
    if task is None:
        return torch.zeros(features)
    for part in load_task_table(run / MODEL):
        if len(at := (part["numbers"] == number_task(task)).nonzero()):
            return part["state"][int(at), :features]
    raise ConfigError(
        f"--task {task}: the table of tasks of {run} has none of this name. Names are those of "
        "data.task_column; leave it out for a new task."
    )

"""MetaRewardWorker: a reward model for many annotators, domains or users with few pairs of each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from hybridrl.algorithms import TokenLoss, TokenSegments
from hybridrl.algorithms.meta_learning import (
    InnerLoop,
    MetaGradients,
    compute_meta_gradients,
)
from hybridrl.batch.batch import Batch
from hybridrl.checkpoint.tensors.tensor_writer import write_small_file
from hybridrl.config.preference_schema import MetaConfig
from hybridrl.config.schema import ActorConfig
from hybridrl.controller import ONE_TO_ALL, TASKS, THREE_D, UPDATE_TASKS, WorkerContext, transfer
from hybridrl.data.task_blocks import TASK, TASK_BLOCK_COLUMNS
from hybridrl.errors import ConfigError, StorageError
from hybridrl.layout.rank_mesh import MeshCoordinate
from hybridrl.parallel.collectives import reduce_over
from hybridrl.parallel.sharded_table import ShardedTable
from hybridrl.system.device_traits import synchronize_device
from hybridrl.system.locations import Location, list_file_sizes, open_reader, parse_location
from hybridrl.workers.generation import SAMPLE_COLUMNS
from hybridrl.workers.model_worker import TrainedModelWorker
from hybridrl.workers.training_engines import ModelSource, build_feature_engine

TASK_COLUMNS = ("features", *TASK_BLOCK_COLUMNS)
TABLE_FILE = "task_table"
"""Begins the names of the files of the table of tasks, one for each data-parallel rank."""
_ENDING = ".safetensors"
_GRADIENT = "feature_gradient/"


class _TaskPairs(NamedTuple):
    """This rank's pairs, and the numbers of the tasks of its blocks.

    Attributes:
        numbers: `[blocks]`.
        of_pair: `[pairs]`, the block of each.
    """

    numbers: Tensor
    of_pair: Tensor
    is_query: Tensor
    differences: Tensor


class MetaRewardWorker(TrainedModelWorker):
    """One rank of a reward model whose head has several outputs, the features of a reward, and of
    the table of tasks. Pairs are neighbouring rows, the chosen one first, and all pairs of a task
    are on one rank.

    Args:
        source: A language model that gets a new head, or a reward model to train on.
        config: Training.
        meta: The inner loop and the table.
        updates: Optimizer steps of the whole job, for the schedule.
    """

    def __init__(
        self,
        context: WorkerContext,
        source: ModelSource,
        config: ActorConfig,
        meta: MetaConfig,
        updates: int,
    ) -> None:
        super().__init__(context, source)
        self._meta = meta
        self._inner = InnerLoop(meta.inner_steps, meta.inner_rate, meta.second_order)
        engine = build_feature_engine(context, source, config, meta.features)
        engine.start_optimizer(config.optimizer, updates)
        self.model_engine, self._group = engine, engine.mesh.group("dp")
        self._table = ShardedTable(meta.features, meta.task_rate, self._group, engine.device)

    @transfer(THREE_D, reads=SAMPLE_COLUMNS, makes=("features",))
    def compute_features(self, batch: Batch) -> Batch:
        """Compute the reward `features` of each row, those at its last token."""
        with self.phase("score"):
            values = self.model_engine.forward(batch).ragged("values").values
            ends = torch.from_numpy(batch.lengths("response_ids")).cumsum(0) - 1
            return Batch.from_columns({"features": values.view(-1, self._meta.features)[ends]})

    @transfer(TASKS, reads=TASK_COLUMNS, makes=("scores", "shared_scores"))
    def compute_task_scores(self, batch: Batch) -> Batch:
        """Compute the `scores` of each row with the weights that the support pairs of its task
        gave, and the `shared_scores` with the start that all tasks share."""
        features, pairs = self._read_features(batch), self._read_pairs(batch)
        support = ~pairs.is_query
        weights = self._inner.adapt(
            *(self._table.fetch(pairs.numbers), pairs.differences[support], pairs.of_pair[support])
        ).detach()
        scores = (weights[pairs.of_pair.repeat_interleave(2)] * features).sum(1)
        columns = {"scores": scores.cpu(), "shared_scores": features[:, 0].cpu()}
        return Batch.from_columns(columns)

    @transfer(UPDATE_TASKS, reads=(*SAMPLE_COLUMNS, *TASK_COLUMNS))
    def update_tasks(self, batch: Batch) -> dict[str, float]:
        """Take one step of the outer loop: of the model by the sum of all ranks' gradients, and of
        the rows of the tasks on the ranks that hold them.

        The gradient of the loss with respect to the `features` is found first and then passed back
        through the model, so that micro-batches may divide tasks.
        """
        with self.phase("train"):
            pairs = self._read_pairs(batch)
            is_new = _by_pair(batch, "is_new").bool().to(self.model_engine.device)
            is_known = torch.ones(len(pairs.numbers), dtype=torch.bool, device=is_new.device)
            is_known[pairs.of_pair[is_new]] = False
            rows = self._table.fetch(pairs.numbers) * is_known[:, None]
            found = compute_meta_gradients(
                *(pairs.differences, rows, pairs.of_pair, pairs.is_query),
                _by_pair(batch, "query_weights").to(rows.device),
                self._inner,
            )
            metrics = self.model_engine.update(
                _with_gradients(batch, found.differences), _feature_loss, rows_together=2
            )
            if not metrics["skipped_updates"] and self._meta.task_rate:
                self._table.update(pairs.numbers[is_known], found.rows[is_known])
            synchronize_device(self.model_engine.device)
        return metrics | self._sum_metrics(pairs, found)

    @transfer(ONE_TO_ALL)
    def save_model(self, folder: str, dtype: str | None = None) -> None:
        """Write model, tokenizer and the table of tasks; the head of the model has an output for
        each feature. `hybridrl adapt` makes a reward model of it."""
        super().save_model(folder, dtype)
        self._save_table(Path(folder))

    @transfer(ONE_TO_ALL)
    def save_state(self, folder: str) -> None:
        super().save_state(folder)
        self._save_table(parse_location(folder))

    @transfer(ONE_TO_ALL)
    def start_saving(self, folder: str, copy: str | None = None) -> None:
        super().start_saving(folder, copy)
        self._save_table(parse_location(folder))
        if copy is not None:
            with suppress(StorageError):  # the state is on the disk all the same
                self._save_table(parse_location(copy))

    @transfer(ONE_TO_ALL)
    def load_state(self, folder: str) -> None:
        super().load_state(folder)
        self._table.clear()
        for part in load_task_table(parse_location(folder)):
            self._table.load(part["numbers"], part["state"])

    def _save_table(self, folder: Location) -> None:
        places = dict(self.model_engine.mesh.coordinates)
        part = places.pop("dp", MeshCoordinate(0, 1))
        if any(place.index for place in places.values()):  # others have the same rows
            return
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob(f"{TABLE_FILE}-*") if part.index == 0 else ():
                if not file.name.endswith(f"-of-{part.size:05d}{_ENDING}"):
                    file.unlink()  # of a run on another number of ranks
        name = f"{TABLE_FILE}-{part.index + 1:05d}-of-{part.size:05d}{_ENDING}"
        write_small_file(folder / name, save(self._table.export()))

    def _read_features(self, batch: Batch) -> Tensor:
        values = batch.ragged("features").values.view(-1, self._meta.features)
        return values.to(self.model_engine.device)

    def _read_pairs(self, batch: Batch) -> _TaskPairs:
        blocks, of_pair = torch.unique(_by_pair(batch, "task_block"), return_inverse=True)
        numbers = torch.zeros_like(blocks)
        numbers[of_pair] = _by_pair(batch, TASK)  # a task may have several blocks in a step
        features = self._read_features(batch)
        device = features.device
        return _TaskPairs(
            numbers.to(device),
            of_pair.to(device),
            _by_pair(batch, "is_query").bool().to(device),
            features[::2] - features[1::2],
        )

    def _sum_metrics(self, pairs: _TaskPairs, found: MetaGradients) -> dict[str, float]:
        """Return the loss, and the shares of all ranks' query pairs that the adapted weights and
        the shared start tell right."""
        query = pairs.is_query
        sums = torch.stack(
            [
                found.loss.double(),
                query.sum().double(),
                (found.margins[query] > 0).sum().double(),
                (found.shared_margins[query] > 0).sum().double(),
                torch.tensor(float(len(pairs.numbers)), dtype=torch.float64, device=query.device),
            ]
        )
        loss, count, right, shared, tasks = reduce_over(self._group, sums).tolist()
        return {
            **{"loss": loss, "tasks": tasks, "pair_accuracy": right / max(1.0, count)},
            "shared_pair_accuracy": shared / max(1.0, count),
        }


def load_task_table(folder: Location) -> list[Mapping[str, Tensor]]:
    """Read the table of tasks of a folder, as each rank has written its part.

    Raises:
        ConfigError: if parts are missing.
    """
    found: list[Mapping[str, Tensor]] = []
    names = [name for name in list_file_sizes(folder) if name.startswith(TABLE_FILE)]
    if not names or len(names) != int(names[0].removesuffix(_ENDING).rpartition("-")[2]):
        raise ConfigError(
            f"{folder} has {len(names)} files `{TABLE_FILE}-*`, not all parts of the table of "
            "tasks of algorithm=meta_reward_model. Take another step, or bring the files back."
        )
    for name in names:
        with open_reader(folder / name) as stream:
            found.append(load(stream.read()))
    return found


def _by_pair(batch: Batch, column: str) -> Tensor:
    values: Tensor = batch[column]
    return values[::2]


def _with_gradients(batch: Batch, differences: Tensor) -> Batch:
    """Return the rows with the gradient of the loss with respect to each of their features, which
    counts at a row's last token."""
    gradients = torch.stack([differences, -differences], 1).flatten(0, 1).cpu()
    responses = batch.ragged("response_ids")
    mask = torch.zeros(len(responses.values), dtype=torch.uint8)
    mask[responses.cu_seqlens[1:] - 1] = 1
    return batch.select(SAMPLE_COLUMNS).with_columns(
        {
            "response_mask": responses._replace(values=mask),
            "loss_weights": responses._replace(values=mask.float()),
            **{f"{_GRADIENT}{n}": column for n, column in enumerate(gradients.unbind(1))},
        }
    )


def _feature_loss(
    outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
) -> TokenLoss:
    """Return a loss whose gradient with respect to the features is that of the columns."""
    values = outputs["values"]
    wanted = [columns[f"{_GRADIENT}{n}"] for n in range(values.shape[1])]
    return TokenLoss((values * torch.stack(wanted, 1)).sum(1), {})

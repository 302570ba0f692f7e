"""Preference pairs of many tasks (annotators, domains, users), stored task by task: the index of
their blocks, the schedule that deals them, and the split into support and query pairs.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.config.preference_schema import MetaConfig
from hybridrl.data.stored_rows import store_rows
from hybridrl.errors import DataError
from hybridrl.system.storage import explain_write_errors

TASK = "pair_task"
"""The column of a pair's task: its name as it was read, then the number of `number_task`."""
TASK_BLOCK_COLUMNS = (TASK, "task_block", "is_query", "is_new", "query_weights")
"""The columns of `split_tasks`."""
LARGE_BYTES = 256 << 20
"""From this size on, rows that are sorted by task are stored in a file."""
Rows = npt.NDArray[np.int64]


class TaskBlock(NamedTuple):
    """An entry of the index: `length` neighbouring rows of a task, from row `offset` on."""

    task: int
    offset: int
    length: int


def number_task(name: str) -> int:
    """Return the number of a task, a hash of its name with 63 bits, so that no list of names is
    needed to tell tasks of later data apart."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def sort_by_task(pairs: Batch, drop: bool, folder: Path | None = None) -> Batch:
    """Return the pairs with those of a task next to each other, in the order of the data, and
    numbers in the column `pair_task`.

    Args:
        drop: Leave out tasks with a single pair, which can not be split.
        folder: Where large data is stored in this order, in a file without a name; None: it stays
            in memory.

    Raises:
        DataError: for such a task.
    """
    names, first, of_pair, sizes = np.unique(
        np.array(pairs[TASK], dtype=object).astype(str),
        *(True, True, True),
    )
    if (small := sizes < 2).any() and not drop:
        raise DataError(
            f"{small.sum()} of {len(names)} tasks (data.task_column) have a single pair, such as "
            f"`{names[small][0]}`: there is none left to measure what was learned from it. Leave "
            "them out with data.bad_rows=drop, or give them more pairs."
        )
    order = np.argsort(first[of_pair], kind="stable")
    order = order[~small[of_pair[order]]]
    numbers = np.array([number_task(name) for name in names.tolist()], np.int64)
    named = Batch(pairs.table.drop_columns([TASK])).with_columns({TASK: numbers[of_pair]})
    if folder is None or named.nbytes < LARGE_BYTES:
        return named.take(order)
    with explain_write_errors(folder, "cache.folder"):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            return store_rows(named, order, file)


def index_tasks(tasks: Rows, most: int) -> list[TaskBlock]:
    """Return the index of rows that stand task by task: blocks of equal sizes of at most `most`
    rows of one task."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(tasks)) + 1, [len(tasks)]]).tolist()
    blocks = []
    for start, stop in pairwise(bounds):
        parts = -(-(stop - start) // most)
        ends = [start + (stop - start) * part // parts for part in range(parts + 1)]
        blocks += [
            TaskBlock(int(tasks[start]), begin, end - begin) for begin, end in pairwise(ends)
        ]
    return blocks


class TaskSchedule:
    """The row schedule of pairs of many tasks. Each epoch deals every block once, in an order drawn
    from `(seed, epoch)`; the rows of a block are neighbours.

    Args:
        tasks: The task of each row, all rows of a task next to each other.
        most: Rows of a task in a step.
    """

    sampler = None

    def __init__(self, tasks: Rows, most: int, seed: int) -> None:
        self.index = index_tasks(tasks, most)
        self._seed, self._position = seed, 0  # blocks dealt so far, over all epochs
        self._crc32 = zlib.crc32(np.asarray(self.index, np.int64).tobytes())

    def deal(self, number: int) -> Rows:
        """Return the rows of the next blocks, at least `number` of them."""
        parts: list[Rows] = []
        while sum(map(len, parts)) < number:
            epoch, place = divmod(self._position, len(self.index))
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self.index))
            block = self.index[order[place]]
            parts.append(np.arange(block.offset, block.offset + block.length))
            self._position += 1
        return np.concatenate([np.empty(0, np.int64), *parts])

    def learn(self, rows: Rows, scores: npt.NDArray[np.float32]) -> None:
        """Take no note of scores."""

    def state(self) -> dict[str, Any]:
        return {"blocks": self._position, "seed": self._seed, "index": self._crc32}

    def load_state(self, state: Mapping[str, Any]) -> None:
        mine = self.state()
        if any(state.get(name) != mine[name] for name in ("seed", "index")):
            raise DataError(
                "The checkpoint was written with other tasks, another meta.task_pairs or another "
                "run.seed, so the order of the tasks cannot go on. Use the old data and settings, "
                "or start a new run from the checkpoint's weights."
            )
        self._position = int(state["blocks"])


def split_tasks(pairs: Batch, meta: MetaConfig, *seed: int) -> Batch:
    """Split the pairs of each task, which are neighbours, into support and query.

    Args:
        seed: Of the draw.

    Returns:
        The pairs with the columns `task_block` (a number for each block), `is_query` and `is_new`
        (uint8; the latter of all pairs of blocks that begin from the shared start), and
        `query_weights` (float32): of query pairs their weights in the loss, mean over the query
        pairs of a block and then over blocks.
    """
    random = np.random.default_rng([2, *seed])
    tasks = pairs[TASK].numpy()
    is_query, is_new = np.zeros(len(tasks), np.uint8), np.zeros(len(tasks), np.uint8)
    weights, of_block = np.zeros(len(tasks), np.float32), np.zeros(len(tasks), np.int64)
    blocks = index_tasks(tasks, max(1, len(tasks))) if len(tasks) else []
    with_query = sum(block.length > 1 for block in blocks)
    for number, (_, offset, length) in enumerate(blocks):
        of_block[offset : offset + length] = number
        drawn = offset + random.permutation(length)
        query = drawn[min(meta.support_pairs, max(1, length - 1)) :]
        is_query[query] = 1
        is_new[offset : offset + length] = random.random() < meta.new_share
        weights[query] = 1 / (max(1, len(query)) * with_query) if with_query else 0.0
    return pairs.with_columns(
        dict(zip(TASK_BLOCK_COLUMNS[1:], (of_block, is_query, is_new, weights), strict=True))
    )

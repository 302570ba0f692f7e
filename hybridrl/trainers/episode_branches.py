"""The rows that are learned from when episodes have branches.

An episode that a program of its own plays may have several branches: what the model saw was not
only continued. Each is a row of its own, for the model reads each by itself; what was said of the
episode holds for all of them. The driver learns two numbers of an episode; tokens stay where they
are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import Batch
from hybridrl.batch.kept_sets import KEPT_SETS, decode_kept_sets
from hybridrl.batch.row_balancing import split_by_runs
from hybridrl.controller import BatchRef, WorkerGroup

_BRANCH_COLUMNS = ("response_ids", "response_mask", "rollout_log_probs", "turn", "token_versions")
"""The columns of a branch's response; the last where weights change while samples are made."""
_BRANCH_INPUTS = ("branches", "branch", "branch_prompt_lengths", "branch_response_lengths")


def unfold_episodes(
    samples: BatchRef, put: Callable[[Batch], BatchRef], on: WorkerGroup, first: int
) -> tuple[BatchRef, Callable[[BatchRef], BatchRef]]:
    """Return a row for each branch of the episodes, those of an episode next to each other, with
    the column `episode`, which they share; and a function that gives columns with a row for each
    episode to each of these rows. Waits for the samples.

    An episode that failed, so that its reward is NaN, and one in which nothing was sampled, have no
    rows: they cost nothing.

    Args:
        put: Hands a batch of the driver's to the workers.
        on: The group on whose hosts branches are taken apart.
        first: The number of the first episode; the next have the next numbers.
    """
    known = samples.collect(["branches", "episode_rewards"])
    counts = torch.where(known["episode_rewards"].isnan(), 0, known["branches"]).long().numpy()
    episodes = np.repeat(np.arange(len(counts)), counts)
    branches = np.concatenate([np.arange(0), *map(np.arange, counts)])
    rows = samples.take(episodes) | put(
        Batch.from_columns({"episode": first + episodes, "branch": branches})
    )
    makes = ["prompt_ids", *filter(samples.columns.may_have, (*_BRANCH_COLUMNS, KEPT_SETS))]
    reads = [*_BRANCH_INPUTS, *makes, *(f"branch_{name}" for name in makes)]
    rows |= rows.apply(select_branch_tokens, reads, makes=makes, on=on, together=1)
    return rows, lambda batch: batch.take(episodes)


def select_branch_tokens(batch: Batch) -> Batch:
    """Return for each row the tokens of the branch that it stands for (`branch`, from 0). The last
    branch lies in the row's own columns, the others concatenated in `branch_*`. Rows do not depend
    on each other."""
    branch, is_last = batch["branch"], batch["branch"] == batch["branches"] - 1

    def own(name: str, lengths: str) -> RaggedColumn:
        sizes = batch.ragged(lengths)
        further, last = batch.ragged(f"branch_{name}"), batch.ragged(name).rows()
        found = []
        for row, (tokens, size) in enumerate(zip(further.rows(), sizes.rows(), strict=True)):
            number = int(branch[row])
            start = int(size[:number].sum())
            found.append(last[row] if is_last[row] else tokens[start : start + int(size[number])])
        return _make_ragged_column(found, batch.ragged(name).values)

    found = {"prompt_ids": own("prompt_ids", "branch_prompt_lengths")}
    for name in filter(batch.__contains__, _BRANCH_COLUMNS):
        found[name] = own(name, "branch_response_lengths")
    if KEPT_SETS in batch:
        found[KEPT_SETS] = _select_kept_sets(batch)
    return Batch.from_columns(found)


def _select_kept_sets(batch: Batch) -> RaggedColumn:
    """Return the sets of each row's branch; those of a branch are as long as they say."""
    further, last = batch.ragged(f"branch_{KEPT_SETS}").rows(), batch.ragged(KEPT_SETS)
    lengths = batch.ragged("branch_response_lengths").rows()
    rows = zip(batch["branch"].tolist(), further, lengths, last.rows(), strict=True)
    found = [
        torch.from_numpy([*decode_kept_sets(values, sizes.tolist())][number].encode())
        if number < len(sizes)
        else own
        for number, values, sizes, own in rows
    ]
    return _make_ragged_column(found, last.values)


def parts_of_groups(
    batch: BatchRef, parts: int, seed: int, dealt: int, passes: int, pairs: bool = False
) -> list[BatchRef]:
    """Split like `BatchRef.split`, in random order, with all samples of a prompt in the same part
    (`group_id`); where prompts are fewer than parts, with all rows of an episode, or each row by
    itself.

    Args:
        seed, passes: What the order depends on, beside the newest prompt.
        dealt: Prompts dealt out so far, in place of that where rows do not say their prompt.
        pairs: Neighbouring rows are pairs, and stay together.
    """
    names = [name for name in ("group_id", "episode") if batch.columns.may_have(name)]
    known = batch.collect(names, partial=True) if names else Batch(pa.table({}))
    units = [known[name].numpy() for name in names if name in known.columns]
    if "group_id" in known.columns and len(batch):  # whatever has been dealt out ahead
        dealt = int(known["group_id"].max()) + 1
    order = np.random.default_rng([seed, 4, dealt, passes])
    units.append(np.arange(len(batch)) // (2 if pairs else 1))
    for unit in units:
        numbers, of_rows = np.unique(unit, return_inverse=True)
        if len(numbers) >= parts:
            break
    place = order.permutation(len(numbers))[of_rows]
    rows = np.argsort(place, kind="stable")
    blocks = split_by_runs(place[rows].tolist(), parts)
    return [batch.take(rows[block.start : block.stop]) for block in blocks]


def _make_ragged_column(rows: list[Tensor], like: Tensor) -> RaggedColumn:
    """Make a column of these rows with the dtype of `like`, also for no rows."""
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return RaggedColumn(torch.cat([like[:0], *rows]), lengths.cumsum(0))

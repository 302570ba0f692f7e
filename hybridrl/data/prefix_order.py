"""The prefix order of prompts (`data.order=prefix`): prompts that begin with the same tokens come
in the same step, so that the generator computes what they share once.

The prompts are the leaves of the tree of their prefixes. An epoch visits them depth first, the
children of each node in random order, and cuts this traversal into *branches* of neighbouring
rows, where neighbours share least. The branches are ranked by the traits of their rows (source,
difficulty, length) and divided into strata, and a step takes a branch from each: random ones, so
that epochs differ, and one of each kind, so that a step is like the whole data. It is BGL's
proximity-aware order (Liu et al. 2021, arXiv:2112.08541) with strata for its sequences.
`PrefixOrder` takes the longest branches with which the shuffling error of steps is within
`data.max_shuffle_error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hybridrl.batch.batch import Batch
from hybridrl.data.shuffle_error import ShuffleError

BLOCK_TOKENS = 32
"""Prefixes are compared by whole blocks of so many tokens, as vLLM caches them."""
_MIN_HIT_SHARE = 0.1
"""Share of the tokens of prompts that `auto` wants to find in the cache; with fewer, generation
gains next to nothing."""
_MEASURED_STEPS = 64
"""Number of steps from which the shuffling error (at least) and hits (at most) are predicted. The
two or three steps of a small set's epoch may be like the whole by chance."""
Rows = npt.NDArray[np.int64]


class PrefixTree:
    """The tree of the prefixes of prompts, as an order of its leaves.

    Args:
        prompts: Rows with the column `prompt_ids`.

    Attributes:
        leaves: The rows in an order that keeps those of every prefix together.
        shared: Of each leaf, the number of blocks that it shares with the leaf before it.
    """

    def __init__(self, prompts: Batch) -> None:
        ids = prompts.ragged("prompt_ids")
        tokens, bounds = ids.values.numpy(), ids.cu_seqlens.numpy().astype(np.int64)
        buffers = [None, pa.py_buffer(bounds * tokens.itemsize), pa.py_buffer(tokens)]
        # As bytes numbers have another order, but those that are equal stay together.
        keys = pa.Array.from_buffers(pa.large_binary(), len(prompts), buffers)
        self.leaves = pc.sort_indices(keys).to_numpy().astype(np.int64)
        self.shared = np.zeros(len(prompts), np.int64)
        starts, blocks = bounds[self.leaves], np.diff(bounds)[self.leaves] // BLOCK_TOKENS
        pairs, depth = np.arange(1, len(prompts)), 0  # neighbours that are equal so far
        while len(pairs := pairs[np.minimum(blocks[pairs - 1], blocks[pairs]) > depth]):
            places = depth * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
            ours, others = (tokens[starts[one][:, None] + places] for one in (pairs, pairs - 1))
            pairs, depth = pairs[(ours == others).all(1)], depth + 1
            self.shared[pairs] = depth

    def traverse(self, random: np.random.Generator) -> tuple[Rows, Rows]:
        """Return the rows depth first, the children of each node in random order, and of each the
        number of blocks that it shares with the row before it."""
        order, shared = random.permutation(len(self.leaves)), np.zeros_like(self.leaves)
        depths = np.unique(self.shared)[1:]  # without the root
        for depth in depths[::-1]:
            node = self._nodes(depth)
            key = random.permutation(node[-1] + 1)[node]
            order = order[np.argsort(key[order], kind="stable")]
        for depth in depths:
            node = self._nodes(depth)[order]
            shared[1:][node[1:] == node[:-1]] = depth
        return self.leaves[order], shared

    def count_hits(self, steps: Rows) -> int:
        """Return how many tokens of prompts begin an earlier prompt of the same step, too.

        Args:
            steps: Row numbers, `[steps, rows of a step]`.
        """
        place = np.empty_like(self.leaves)
        place[self.leaves] = np.arange(len(place))
        numbers, depths, hits = np.arange(len(steps))[:, None], np.unique(self.shared), 0
        for depth, blocks in zip(depths[1:], np.diff(depths), strict=True):
            node = self._nodes(depth)
            found = numbers * (node[-1] + 1) + node[place[steps]]
            hits += int(blocks) * (found.size - len(np.unique(found)))
        return hits * BLOCK_TOKENS

    def _nodes(self, depth: int) -> Rows:
        """Return the number of each leaf's node so many blocks below the root. A leaf with fewer
        blocks, or whose blocks no other has, is a node of its own."""
        return np.cumsum(self.shared < depth) - 1


class PrefixOrder:
    """The prefix order of each epoch.

    Args:
        prompts: Rows with the column `prompt_ids`.
        step: Number of them in a step.
        max_error: The largest shuffling error; see `ShuffleError`.
        seed: Of the epochs by which the length of branches is chosen.

    Attributes:
        branch: Mean number of rows of a branch.
    """

    def __init__(self, prompts: Batch, step: int, max_error: float, seed: int) -> None:
        self._prompts, self._max_error, self._seed = prompts, max_error, seed
        self._step = min(step, len(prompts))
        self.error = ShuffleError(prompts)

    @cached_property
    def tree(self) -> PrefixTree:
        return PrefixTree(self._prompts)

    @cached_property
    def branch(self) -> int:
        epochs = -(-_MEASURED_STEPS * self._step // len(self._prompts))
        for halvings in range(self._step.bit_length()):
            random, branch = np.random.default_rng(self._seed), self._step >> halvings
            orders = (self.rows(random, branch) for _ in range(epochs))
            steps = np.concatenate([cut_steps(order, self._step) for order in orders])
            if self.error.mean(steps) <= self._max_error:
                break
        return self._step >> halvings

    def state(self) -> dict[str, int]:
        """Return what the order depends on besides the rows and the seed, as plain data."""
        return {"step": self._step, "branch": self.branch}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue an order whose steps may have had another size."""
        self._step, self.branch = state["step"], state["branch"]

    def rows(self, random: np.random.Generator, branch: int | None = None) -> Rows:
        """Return the rows of an epoch."""
        branch = self.branch if branch is None else branch
        rows, shared = self.tree.traverse(random)
        cuts = _cut_branches(shared, branch)
        count, sizes = len(cuts), np.diff(cuts, append=len(rows))
        traits = [np.add.reduceat(one[rows], cuts) / sizes for one in self.error.bins.values()]
        ranked = np.lexsort((random.random(count), *traits[::-1]))
        stratum = np.arange(count) * (self._step // branch) // count
        mixed = ranked[np.lexsort((random.random(count), stratum))]
        number = np.empty(count, np.int64)  # in its stratum
        number[mixed] = np.arange(count) - np.searchsorted(stratum, stratum)
        return rows[np.argsort(np.repeat(number, sizes), kind="stable")]


def _cut_branches(shared: Rows, length: int) -> Rows:
    """Return where branches of about so many rows begin: in each window of so many rows, where
    neighbours share least."""
    padded = np.pad(shared, (0, -len(shared) % length), constant_values=np.iinfo(np.int64).max)
    windows = padded.reshape(-1, length)
    return windows.argmin(1) + np.arange(len(windows)) * length


def cut_steps(order: Rows, step: int) -> Rows:
    """Return the whole steps of an epoch, `[steps, rows of a step]`; of fewer rows than a step has,
    all as one."""
    step = min(step, len(order))
    return order[: len(order) // step * step].reshape(-1, step)


def choose_order(prompts: Batch, step: int, max_error: float, seed: int) -> tuple[str, str]:
    """Choose `prefix` if it at least doubles the tokens of prompts that a step's earlier prompts
    begin with, else `random`, as `data.order=auto` says.

    Returns:
        The choice, and a sentence with its reason.
    """
    prefix, random = PrefixOrder(prompts, step, max_error, seed), np.random.default_rng(seed)
    orders = prefix.rows(random), random.permutation(len(prompts))
    steps = [cut_steps(order, step)[:_MEASURED_STEPS] for order in orders]
    lengths = prompts.lengths("prompt_ids")
    ours, theirs = (prefix.tree.count_hits(one) / max(1, lengths[one].sum()) for one in steps)
    chosen = "prefix" if ours >= max(2 * theirs, _MIN_HIT_SHARE) else "random"
    return chosen, (
        f"data.order=auto chose {chosen}: an earlier prompt of the step begins with {ours:.0%} of "
        f"the tokens of prompts in prefix order, and with {theirs:.0%} in random order."
    )

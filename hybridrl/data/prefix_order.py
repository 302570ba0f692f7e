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
from hybridrl.data.samplers.difficulty_columns import find_difficulty_columns, rank_values

BLOCK_TOKENS = 32
"""Prefixes are compared by whole blocks of so many tokens, as vLLM caches them."""
_MIN_SPARED = 0.25
"""Share of the tokens that a generator computes which `auto` wants to spare it. It gains less than
this, for a token of a prompt costs less than one that is sampled."""
MEASURED_STEPS = 512
"""Number of steps, at least, from which the shuffling error is measured. The two or three steps of
a small set's epoch may be like the whole by chance."""
_COMPARED_STEPS = 64
"""Number of steps, at most, in which hits are counted."""
Rows = npt.NDArray[np.int64]
Bins = npt.NDArray[np.int64]
"""The bin of each row's value of a trait, from 0."""


class PrefixOrder:
    """The prefix order of each epoch.

    Args:
        prompts: Rows with the column `prompt_ids`.
        step: Number of them in a step.
        max_error: The largest shuffling error; see `compute_shuffle_error`.
        seed: Of the epochs by which the length of branches is chosen.

    Attributes:
        branch: Mean number of rows of a branch.
    """

    def __init__(self, prompts: Batch, step: int, max_error: float, seed: int) -> None:
        self._step, self._max_error, self._seed = min(step, len(prompts)), max_error, seed
        self._traits = rank_traits(prompts)
        blocks = prompts.lengths("prompt_ids") // BLOCK_TOKENS
        # Behind the blocks of a row there is place for a number of its own.
        self._bounds = np.append(0, np.cumsum(blocks + 1))
        numbers = np.concatenate([_hash_blocks(piece) for piece in prompts.pieces])
        self._blocks = np.insert(numbers, np.cumsum(blocks), 0)

    @cached_property
    def branch(self) -> int:
        random, branch = np.random.default_rng(self._seed), self._step
        epochs = -(-MEASURED_STEPS * self._step // (len(self._bounds) - 1))
        traversals = [self.traverse(random) for _ in range(epochs)]
        while branch > 1:
            orders = [self._mix(*one, branch, random) for one in traversals]
            if self.error(cut_steps(np.concatenate(orders), self._step)) <= self._max_error:
                break
            branch //= 2
        return branch

    def error(self, steps: Rows) -> float:
        """Compute the mean shuffling error of steps, in the trait that has most."""
        return max(compute_shuffle_error(bins, steps) for bins in self._traits)

    def state(self) -> dict[str, Any]:
        """Return what the order depends on besides the rows and the seed, as plain data."""
        return {"order": "prefix", "step": self._step, "branch": self.branch}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue an order whose steps may have had another size."""
        self._step, self.branch = state["step"], state["branch"]

    def rows(self, random: np.random.Generator) -> Rows:
        """Return the rows of an epoch."""
        return self._mix(*self.traverse(random), self.branch, random)

    def traverse(self, random: np.random.Generator) -> tuple[Rows, Rows]:
        """Return the rows depth first, the children of each node in random order, and of each the
        number of blocks that it shares with the row before it."""
        count, ends = len(self._bounds) - 1, self._bounds[1:] - 1
        # Equal blocks stay equal, and others have another order each time.
        blocks = self._blocks * (random.integers(2**64, size=1, dtype=np.uint64) | np.uint64(1))
        blocks[ends] = random.integers(2**64, size=count, dtype=np.uint64)
        buffers = [None, pa.py_buffer(self._bounds * 8), pa.py_buffer(blocks.astype(">u8"))]
        keys = pa.Array.from_buffers(pa.large_binary(), count, buffers)
        rows = pc.sort_indices(keys).to_numpy().astype(np.int64)
        begins, shared = self._bounds[rows], np.zeros(count, np.int64)
        pairs, depth = np.arange(1, count), 0  # neighbours that are equal so far
        while len(pairs):  # to the number of its own at the latest
            pairs = pairs[blocks[begins[pairs] + depth] == blocks[begins[pairs - 1] + depth]]
            depth += 1
            shared[pairs] = depth
        return rows, shared

    def count_hits(self, steps: Rows) -> int:
        """Return how many tokens of prompts begin an earlier prompt of the same step, too.

        Args:
            steps: Row numbers, `[steps, rows of a step]`.
        """
        rows, shared = self.traverse(np.random.default_rng(self._seed))
        place, following = np.argsort(rows), np.append(shared[1:], 0)
        least = (np.minimum.reduceat(following, np.sort(place[step])) for step in steps)
        return BLOCK_TOKENS * sum(int(one.sum()) for one in least)

    def _mix(self, rows: Rows, shared: Rows, branch: int, random: np.random.Generator) -> Rows:
        """Return the rows of a traversal, cut into branches and mixed."""
        count = len(rows) // branch
        # In each window of so many rows, where neighbours share least.
        windows = shared[: count * branch].reshape(count, branch).argmin(1)
        cuts = windows + np.arange(count) * branch
        sizes = np.diff(cuts, append=len(rows))
        traits = [np.add.reduceat(bins[rows], cuts) / sizes for bins in self._traits]
        ranked = np.lexsort((random.random(count), *traits[::-1]))
        stratum = np.arange(count) * (self._step // branch) // count
        mixed = ranked[np.lexsort((random.random(count), stratum))]
        in_stratum = np.arange(count) - np.searchsorted(stratum, stratum)
        number = in_stratum[np.argsort(mixed)]
        return rows[np.argsort(np.repeat(number, sizes), kind="stable")]


def rank_traits(prompts: Batch) -> list[Bins]:
    """Return the bins of each trait that the rows have."""
    sized = prompts.with_columns({"length": prompts.lengths("prompt_ids")})
    names = ["source", "length", *find_difficulty_columns(prompts, None)]
    known = [name for name in names if name in sized.columns]
    return [rank_values(sized, name) + 1 for name in known]  # 0: unknown


def compute_shuffle_error(bins: Bins, steps: Rows) -> float:
    """Compute the mean shuffling error of steps in one trait of rows: how much less a step's rows
    are like the whole data than rows that are drawn at random.

    It is the total variation distance of a step's distribution over the bins from that of all rows,
    less the distance that is expected of as many rows drawn at random, since a step of few rows is
    never like the whole. Steps of a random order have an error of 0 on average.

    Args:
        steps: Row numbers, `[steps, rows of a step]`.
    """
    from scipy.stats import hypergeom  # takes a second to import

    (number, size), of_all, drawn = steps.shape, np.bincount(bins), np.arange(steps.shape[1] + 1)
    places = bins[steps] + len(of_all) * np.arange(number)[:, None]
    counts = np.bincount(places.reshape(-1), minlength=number * len(of_all)).reshape(number, -1)
    chances = hypergeom.pmf(drawn, len(bins), of_all[:, None], size)
    found = np.abs(counts / size - of_all / len(bins)).sum() / number
    expected = chances * np.abs(drawn / size - of_all[:, None] / len(bins))
    return float(found - expected.sum()) / 2


def _hash_blocks(prompts: Batch) -> npt.NDArray[np.uint64]:
    """Return a number for each whole block of each prompt, the same for the same tokens."""
    ids = prompts.ragged("prompt_ids")
    blocks = ids.lengths.numpy() // BLOCK_TOKENS
    before = BLOCK_TOKENS * (np.cumsum(blocks) - blocks)
    begins = np.repeat(ids.cu_seqlens.numpy()[:-1] - before, blocks)
    begins += BLOCK_TOKENS * np.arange(len(begins))
    whole = ids.values.numpy()[begins[:, None] + np.arange(BLOCK_TOKENS)].astype(np.uint64)
    factors = np.random.default_rng(0).integers(2**64, size=BLOCK_TOKENS, dtype=np.uint64)
    return np.asarray(whole @ factors)


def cut_steps(order: Rows, step: int) -> Rows:
    """Return the whole steps of an epoch, `[steps, rows of a step]`; of fewer rows than a step has,
    all as one."""
    step = min(step, len(order))
    return order[: len(order) // step * step].reshape(-1, step)


def compare_orders(
    prompts: Batch, response: int, step: int, max_error: float, seed: int
) -> tuple[bool, str]:
    """Compare what the prompts of a step share in prefix order and in random order.

    Args:
        response: The most tokens that are sampled for a prompt.

    Returns:
        Whether `data.order=auto` is to take prefix order, and a sentence with the figures.
    """
    prefix, random = PrefixOrder(prompts, step, max_error, seed), np.random.default_rng(seed)
    orders = prefix.rows(random), random.permutation(len(prompts))
    steps = [cut_steps(order, step)[:_COMPARED_STEPS] for order in orders]
    lengths = prompts.lengths("prompt_ids")
    ours, theirs = (prefix.count_hits(one) / max(1, lengths[one].sum()) for one in steps)
    spared = (ours - theirs) * lengths.mean() / (lengths.mean() + response)
    return bool(spared >= _MIN_SPARED), (
        f"an earlier prompt of the step begins with {ours:.0%} of the tokens of prompts in prefix "
        f"order, and with {theirs:.0%} in random order, which spares at least {spared:.0%} of what "
        f"is computed; the shuffling error of branches of {prefix.branch} rows is "
        f"{prefix.error(cut_steps(orders[0], step)):.2f}"
    )

"""An endless, resumable iterator over the prompts of the training data."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridrl.batch.batch import Batch
from hybridrl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class PromptLoader(Iterator[Batch]):
    """An endless iterator over batches of `prompts_per_step` rows.

    Each epoch deals every prompt once, in an order drawn from `(seed, epoch)`. A step that reaches
    the end of an epoch goes on into the next one, so no prompt is ever left out and every step has
    the same size; a step may be larger than the data set.

    Args:
        name: Of what it deals from, where several loaders share a seed; each name has an order of
            its own.
    """

    def __init__(
        self,
        prompts: Batch,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        name: str = "",
    ) -> None:
        if len(prompts) == 0:
            raise DataError("There is no prompt to train on: the data set has no rows.")
        if prompts_per_step < 1:
            raise ConfigError(f"`data.prompts_per_step` is {prompts_per_step}, expected 1 or more.")
        if seed < 0:
            raise ConfigError(f"`run.seed` is {seed}, expected 0 or more.")
        self._prompts = prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._name = [zlib.crc32(name.encode())] if name else []
        self._shuffle = shuffle
        self._position = 0  # rows dealt so far, over all epochs
        self._order_of_epoch: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> float:
        """Return the number of passes over the data so far; 1.5 is the middle of the second one."""
        return self._position / len(self._prompts)

    def __next__(self) -> Batch:
        return self._prompts.take(self.deal())

    def deal(self, number: int | None = None) -> npt.NDArray[np.int64]:
        """Return the row numbers of the next step, or the next `number` ones."""
        end = self._position + (self._prompts_per_step if number is None else number)
        parts = []
        position = self._position
        while position < end:
            epoch, start = divmod(position, len(self._prompts))
            part = self._order(epoch)[start : start + end - position]
            parts.append(part)
            position += len(part)
        self._position = end
        return np.concatenate(parts)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as a small JSON-able dictionary for a checkpoint."""
        return {
            "position": self._position,
            "rows": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "crc32": self._crc32,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where the loader that made `state` stopped; `prompts_per_step` may differ.
        `prompts_per_step` may differ.

        Raises:
            DataError: if the data set, the seed or the shuffling is not the one of `state`, which
                would repeat some prompts and leave out others without a word.
        """
        mine = self.state()
        names = {"rows": "number of prompts", "seed": "run.seed", "shuffle": "data.shuffle"}
        for key, name in names.items():
            if state[key] != mine[key]:
                raise DataError(
                    f"The checkpoint was written with {state[key]} as `{name}` and this run has "
                    f"{mine[key]}, so the order of the prompts cannot go on. Use the old data and "
                    "settings, or start a new run from the checkpoint's weights."
                )
        if state.get("crc32") != mine["crc32"]:
            _log.warning(
                "These prompts are not those that the checkpoint was made with: their number is "
                "the same, their tokens or which of them are held out are not (%s). The order goes "
                "on with those that are here.",
                "the data has changed" if "crc32" in state else "it is of an older version",
            )
        self._position = int(state["position"])

    @cached_property
    def _crc32(self) -> int | None:
        """Return the CRC-32 of the tokens of all prompts; None if the rows have no tokens. None of
        rows without any."""
        if "prompt_ids" not in self._prompts.columns:
            return None
        return zlib.crc32(self._prompts.ragged("prompt_ids").values.numpy().data)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            rows = len(self._prompts)
            if self._shuffle:
                order = np.random.default_rng([self._seed, epoch, *self._name]).permutation(rows)
            else:
                order = np.arange(rows)
            self._order_of_epoch = epoch, order
        return self._order_of_epoch[1]

"""Endless, resumable iterators over the training data: prompts of one data set, and rows of a
mixture by the schedule of its sources.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from hybridrl.batch.batch import SOURCE_COLUMN, Batch
from hybridrl.config.schema import Config
from hybridrl.data.mixture import DataSource, SourceProportions, parse_sources
from hybridrl.data.prefix_order import PrefixOrder
from hybridrl.data.row_keys import compute_row_keys
from hybridrl.data.samplers import build_sampler, draw_rows
from hybridrl.data.task_blocks import TASK, TaskSchedule
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

    Attributes:
        order: Of the rows of an epoch, in place of a random one; None: that.
    """

    order: PrefixOrder | None = None

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
        found = {
            "position": self._position,
            "rows": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows_crc32": self._crc32,
        }
        return found if self.order is None else found | self.order.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where the loader that made `state` stopped; `prompts_per_step` may differ.

        Raises:
            DataError: if the data set, the seed or the shuffling is not the one of `state`, which
                would repeat some prompts and leave out others without a word.
        """
        mine, state = ({"order": "random", **one} for one in (self.state(), state))
        names = {"rows": "number of prompts", "seed": "run.seed", "shuffle": "data.shuffle"}
        names["order"] = "data.order"
        if self.order is not None:  # goes by the tokens
            names["rows_crc32"] = "CRC-32 of the rows' tokens"
        for key, name in names.items():
            if (theirs := state.get(key)) != mine[key]:
                raise DataError(
                    f"The checkpoint was written with {theirs} as `{name}` and this run has "
                    f"{mine[key]}, so the order of the prompts cannot go on. Use the old data and "
                    "settings, or start a new run from the checkpoint's weights."
                )
        if self.order is not None:
            self.order.load_state(state)
            self._order_of_epoch = None
        if state.get("rows_crc32") != mine["rows_crc32"]:
            _log.warning(
                "These rows are not those that the checkpoint was made with: their number is "
                "the same, their tokens or which of them are held out are not (%s). The order goes "
                "on with those that are here.",
                "the data has changed" if "rows_crc32" in state else "it is of an older version",
            )
        self._position = int(state["position"])

    @cached_property
    def _crc32(self) -> int | None:
        """Return the CRC-32 of the keys of all rows; None if they have no tokens."""
        keys = compute_row_keys(self._prompts)
        return None if keys is None else zlib.crc32(keys.tobytes())

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            rows = len(self._prompts)
            random = np.random.default_rng([self._seed, epoch, *self._name])
            if self.order is not None:
                order = self.order.rows(random)
            elif self._shuffle:
                order = random.permutation(rows)
            else:
                order = np.arange(rows)
            self._order_of_epoch = epoch, order
        return self._order_of_epoch[1]


Rows = npt.NDArray[np.int64]


def build_row_schedule(config: Config, rows: Batch) -> RowSchedule | MixtureSchedule | TaskSchedule:
    """Build the row schedule of a run: one source, a mixture of several, or pairs of many tasks.

    Raises:
        ConfigError: if the sampler will not do for these rows.
        DataError: if a source has none.
    """
    if config.meta is not None and TASK in rows:
        return TaskSchedule(rows[TASK].numpy(), config.meta.task_pairs, config.run.seed)
    sources = parse_sources(config.data)
    return MixtureSchedule(config, rows, sources) if sources else RowSchedule(config, rows)


class RowSchedule:
    """The row schedule of one source.

    Args:
        source: Its name in a mixture, which has its order and its sampler draw by themselves.
        share: Of the rows of a step.

    Attributes:
        loader: Gives each row once in an epoch; unless there is a sampler.
        sampler: See `hybridrl.data.samplers`; None without one.
    """

    def __init__(self, config: Config, rows: Batch, source: str = "", share: float = 1.0) -> None:
        self._config, self._number = config, len(rows)
        data, seed = config.data, config.run.seed
        self.loader = PromptLoader(rows, data.prompts_per_step, seed, data.shuffle, source)
        if data.order == "prefix":
            step = max(1, round(share * data.prompts_per_step))
            self.loader.order = PrefixOrder(rows, step, data.max_shuffle_error, seed)
        own = zlib.crc32(f"{seed} {source}".encode()) if source else seed
        self.sampler = build_sampler(config, rows, own)

    def deal(self, number: int) -> Rows:
        """Return the numbers of the next `number` rows."""
        if self.sampler is None:
            return self.loader.deal(number)
        return draw_rows(self.sampler, number, self._number, self._config)

    def learn(self, rows: Rows, scores: npt.NDArray[np.float32]) -> None:
        """Report to the sampler, if there is one, how samples of these rows were scored."""
        if self.sampler is not None:
            self.sampler.update(rows, scores)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"loader": self.loader.state()}
        if hasattr(self.sampler, "state"):
            found["sampler"] = self.sampler.state()
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.restore(state["loader"])
        if "sampler" in state and hasattr(self.sampler, "load_state"):
            self.sampler.load_state(state["sampler"])


class MixtureSchedule:
    """The row schedule of several sources, mixed in the proportions of their weights. Each source
    has its own epochs or its own sampler.

    Args:
        rows: Of all sources, with the column `source`.
    """

    sampler = None

    def __init__(self, config: Config, rows: Batch, sources: Sequence[DataSource]) -> None:
        of_rows = rows.table.column(SOURCE_COLUMN)
        self._decks: dict[str, RowSchedule] = {}
        self._rows: list[Rows] = []
        self._place = np.zeros(len(rows), np.int64)  # of a row among those of its source
        whole = sum(source.weight for source in sources)
        for source in sources:
            mine = np.flatnonzero(pc.equal(of_rows, source.name).to_numpy())
            if not len(mine):
                raise DataError(f"data.sources.{source.name} has no rows to learn from.")
            share = source.weight / whole
            self._decks[source.name] = RowSchedule(config, rows.take(mine), source.name, share)
            self._rows.append(mine)
            self._place[mine] = np.arange(len(mine))
        self._proportions = SourceProportions([source.weight for source in sources])

    def deal(self, number: int) -> Rows:
        places = np.array(self._proportions.next(number), np.int64)
        found = np.empty(number, np.int64)
        for place, (deck, rows) in enumerate(zip(self._decks.values(), self._rows, strict=True)):
            if (wanted := places == place).any():
                found[wanted] = rows[deck.deal(int(wanted.sum()))]
        return found

    def learn(self, rows: Rows, scores: npt.NDArray[np.float32]) -> None:
        for deck, of_deck in zip(self._decks.values(), self._rows, strict=True):
            mine = np.isin(rows, of_deck)
            deck.learn(self._place[rows[mine]], scores[mine])

    def state(self) -> dict[str, Any]:
        return {
            "proportions": self._proportions.state(),
            "sources": {name: deck.state() for name, deck in self._decks.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        known, mine = list(state.get("sources", ())), list(self._decks)
        if known != mine:
            raise DataError(
                f"The checkpoint was written with the sources {', '.join(known) or 'of no mixture'}"
                f" and this run has {', '.join(mine)}, so the order of the prompts cannot go on. "
                "Use the old sources (their weights may be others), or start a new run from the "
                "checkpoint's weights."
            )
        self._proportions.load_state(state["proportions"])
        for name, deck in self._decks.items():
            deck.load_state(state["sources"][name])

"""The order in which the rows of the data are learned from: shuffled epochs, or a sampler's choice,
for each source."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config
from hybridrl.data.mixture import SOURCE_COLUMN, DataSource, SourceProportions, parse_sources
from hybridrl.data.prompt_loader import PromptLoader
from hybridrl.data.samplers import build_sampler, draw_rows
from hybridrl.errors import DataError

Rows = npt.NDArray[np.int64]


def build_row_schedule(config: Config, rows: Batch) -> RowSchedule | MixtureSchedule:
    """Build the row schedule of a run: one source, or a mixture of several.

    Raises:
        ConfigError: if the sampler will not do for these rows.
        DataError: if a source has none.
    """
    sources = parse_sources(config.data)
    return MixtureSchedule(config, rows, sources) if sources else RowSchedule(config, rows)


class RowSchedule:
    """The row schedule of one source.

    Args:
        source: Its name in a mixture, which has its order and its sampler draw by themselves.

    Attributes:
        loader: Gives each row once in an epoch; unless there is a sampler.
        sampler: See `hybridrl.data.samplers`; None without one.
    """

    def __init__(self, config: Config, rows: Batch, source: str = "") -> None:
        self._config, self._number = config, len(rows)
        data, seed = config.data, config.run.seed
        self.loader = PromptLoader(rows, data.prompts_per_step, seed, data.shuffle, source)
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
        for source in sources:
            mine = np.flatnonzero(pc.equal(of_rows, source.name).to_numpy())
            if not len(mine):
                raise DataError(f"data.sources.{source.name} has no rows to learn from.")
            self._decks[source.name] = RowSchedule(config, rows.take(mine), source.name)
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

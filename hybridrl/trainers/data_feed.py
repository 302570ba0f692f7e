"""The prompts, examples or pairs that a driver program learns from, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.algorithms import find_informative_rows
from hybridrl.batch.batch import OUTCOMES, SOURCE_COLUMN, Batch, outcomes_of
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef
from hybridrl.data.mixture import list_source_names
from hybridrl.data.prompt_loader import PromptLoader, build_row_schedule
from hybridrl.data.row_keys import remove_keys
from hybridrl.data.task_blocks import split_tasks
from hybridrl.errors import ConfigError, DataError
from hybridrl.run_files.recorded_steps import DATA, DriverActivity
from hybridrl.trainers.update_columns import loss_weights

PREFIX = "source/"


class SourceMetrics:
    """Metrics for each source of a mixture.

    Args:
        rows: To learn from.

    Attributes:
        names: Of the sources; empty where the data has a single one.
    """

    def __init__(self, config: Config, rows: Batch) -> None:
        self.names = list_source_names(config.data) if SOURCE_COLUMN in rows.columns else []
        places = {name: place for place, name in enumerate(self.names)}
        of_rows = rows.table.column(SOURCE_COLUMN).to_pylist() if self.names else []
        self._of_rows = np.array([places.get(name, -1) for name in of_rows], np.int64)

    def of_groups(
        self,
        rows: npt.NDArray[np.int64],
        groups: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
    ) -> dict[str, float]:
        """Compute `groups`, the number of a source's prompts in the step, and `zero_variance`, the
        share of them whose samples all score alike, so that they teach nothing.

        Args:
            rows, groups, scores: Of each sample: the number of its row, its group, its score (NaN:
                dropped).
        """
        found: dict[str, float] = {}
        for place, name in enumerate(self.names):
            mine = (self._of_rows[rows] == place) & ~np.isnan(scores)
            if number := len(np.unique(groups[mine])):
                of_sample = torch.from_numpy(groups[mine])
                differ = find_informative_rows(torch.from_numpy(scores[mine]), of_sample)
                alike = number - len(of_sample[differ].unique())
                found[f"{PREFIX}{name}/groups"] = float(number)
                found[f"{PREFIX}{name}/zero_variance"] = alike / number
        return found


def compute_source_metrics(total: Mapping[str, Any]) -> dict[str, float]:
    """Compute `reward/mean`, `accuracy` and `response/length_mean` of each source from the sums of
    the reward workers."""
    ends = "/count"
    names = [
        name.removeprefix(PREFIX).removesuffix(ends)
        for name in total
        if name.startswith(PREFIX) and name.endswith(ends)
    ]
    found = {}
    for name in names:
        begin = f"{PREFIX}{name}"
        if count := total[f"{begin}/count"]:
            found[f"{begin}/reward/mean"] = total[f"{begin}/sum"] / count
            found[f"{begin}/accuracy"] = total[f"{begin}/correct"] / count
        if samples := total[f"{begin}/samples"]:
            found[f"{begin}/response/length_mean"] = total[f"{begin}/tokens"] / samples
    return found


_REMEMBERED_BATCHES = 256
"""So many batches back it is known which rows they had."""
_MAX_DRAWS = 1000
"""So often rows are asked for in the hope of some that are not left out."""
Rows = npt.NDArray[np.int64]


class DataFeed:
    """Batches of the training data in the order of the row schedule, and the scores that come back
    for them.

    Args:
        kind: `prompts`, `examples`, `pairs` or `responses`, as `Trainer.DATA` says.
        data: The training rows, tokenized.
        examples: Prompts with right responses; None where the data has none.
        put: Hands a batch to the workers.
        beside: Told how long the workers wait for batches.

    Attributes:
        deck: Says which rows of `data` come next.
        returned: Rows of prompts of a checkpoint whose samples were unfinished, which are dealt
            again before those of the row schedule.
        numbered: The number of groups handed out so far: prompts, examples or pairs.
    """

    def __init__(
        self,
        config: Config,
        kind: str,
        data: Batch,
        examples: Batch | None,
        tokenizer: Any,
        put: Callable[[Batch], BatchRef],
        beside: DriverActivity,
    ) -> None:
        self.config, self.kind, self.put = config, kind, put
        self.data = remove_keys(data)
        self.tokenizer, self._beside = tokenizer, beside
        self.examples = examples
        number, seed = config.data.prompts_per_step, config.run.seed
        self.deck = build_row_schedule(config, data)
        self._of_sources = SourceMetrics(config, data)
        self._examples = None if examples is None else PromptLoader(examples, number, seed)
        self._learns = config.data.sampler is not None or bool(self._of_sources.names)
        self._ahead: tuple[Rows, Rows, BatchRef] | None = None  # not dealt yet
        self._position: dict[str, Any] = {}  # of the row schedule, before `_ahead`
        self.numbered = 0
        self._row_of: dict[int, int] = {}  # by group, of prompts whose scores are not known yet
        self._deals: deque[tuple[Rows, Rows]] = deque(
            maxlen=_REMEMBERED_BATCHES
        )  # groups, and their rows
        self._left_out: set[int] = set()
        self._held: set[int] = set()
        self.returned: list[int] = []

    def next_batch(self) -> BatchRef:
        """Return the prompts of the next step, numbered in the column `group_id`; or examples; or
        pairs as neighbouring rows."""
        with self._beside.doing(DATA):
            (groups, rows, batch), self._ahead = self._ahead or self._prepare(), None
        self.numbered += len(groups)
        self._deals.append((groups, rows))
        del self.returned[: len(rows)]
        if self._learns or self.config.rollout.partial is not None:
            self._row_of.update(zip(groups.tolist(), rows.tolist(), strict=True))
        return batch

    def prefetch(self) -> None:
        """Prepare the next batch while the workers are at this one. It counts as dealt when
        `next_batch` returns it. A sampler has to know the outcomes of this step first, and a
        program that has asked for no batch so far may not want any."""
        if self._ahead is None and self._deals and self.config.data.sampler is None:
            self._position = self.deck.state()
            try:
                self._ahead = self._prepare()
            except DataError:  # `next_batch` raises it again, should the batch be wanted
                self.deck.load_state(self._position)

    def _prepare(self) -> tuple[Rows, Rows, BatchRef]:
        """Return groups, their rows, and a batch of these that the workers can read."""
        from hybridrl.data.preference_pairs import split_pairs_into_samples

        rows = self._next_rows()
        batch = self.data.take(rows)
        groups = np.arange(self.numbered, self.numbered + len(rows))
        if self.kind == "pairs":
            if self.config.meta is not None:
                batch = split_tasks(batch, self.config.meta, self.config.run.seed, self.numbered)
            return groups, rows, self.put(split_pairs_into_samples(batch))
        return groups, rows, self.put(batch.with_columns({"group_id": groups}))

    def next_examples(self, coefficient: float = 1.0) -> BatchRef:
        """Return prompts with reference responses for one supervised update with this loss
        coefficient."""
        if self._examples is None:
            raise ConfigError(
                f"algorithm.ptx_coefficient={self.config.algorithm.ptx_coefficient} needs right "
                "responses, and only built-in tasks (data.task) bring them."
            )
        batch = next(self._examples)
        weights = loss_weights(batch, "token-mean").ragged("loss_weights")
        scaled = weights._replace(values=weights.values * coefficient)
        return self.put(batch.with_columns({"loss_weights": scaled}))

    def learn_scores(self, scored: BatchRef) -> dict[str, float]:
        """Tells the sampler the outcomes of samples; waits until they are scored.

        Returns:
            Figures of the sources of a mixture.
        """
        if not self._learns:
            return {}
        known = scored.collect(["group_id", "scores", OUTCOMES, "episode"], partial=True)
        if {"group_id", "scores"} - set(known.columns):
            return {}
        if "episode" in known.columns:  # its rows share a score
            _, firsts = np.unique(known["episode"].numpy(), return_index=True)
            known = known.take(np.sort(firsts))
        groups, scores = known["group_id"].numpy(), known["scores"].numpy()
        self._held.difference_update(groups.tolist())
        mine = np.asarray([group in self._row_of for group in groups.tolist()], bool)
        outcomes = outcomes_of(known).numpy()[mine]
        groups, scores = groups[mine], scores[mine]
        rows = np.asarray([self._row_of[group] for group in groups.tolist()], np.int64)
        self.deck.learn(rows, outcomes)
        return self._of_sources.of_groups(rows, groups, scores)

    def forget_groups(self, before: int) -> None:
        """Forget the rows of groups before this number, for which no more scores will come."""
        self._row_of = {
            group: row
            for group, row in self._row_of.items()
            if group >= before or group in self._held
        }

    def hold(self, groups: set[int]) -> None:
        """Remember the rows of these groups, which partial rollouts keep for a later step: where
        scores are needed until these come, else until they are held no longer."""
        known = groups.intersection(self._row_of)
        self._held = self._held | known if self._learns else known

    def leave_out(self, groups: Sequence[int]) -> int:
        """Exclude the prompts (examples, pairs) of these groups from all later batches, and return
        their number. Groups older than `_REMEMBERED_BATCHES` batches are no longer known."""
        rows = [row[np.isin(group, groups)] for group, row in self._deals]
        found = {int(row) for row in np.concatenate([*rows, np.empty(0, np.int64)])}
        self._left_out |= found
        self.returned = [row for row in self.returned if row not in found]
        if self._ahead is not None:  # it may have some of them
            self.deck.load_state(self._position)
            self._ahead = None
        return len(found)

    def state(self) -> dict[str, Any]:
        """Return the position in the data, as plain data."""
        position = self._position if self._ahead else self.deck.state()
        found: dict[str, Any] = {**position, "numbered": self.numbered}
        if self._examples is not None:
            found["examples"] = self._examples.state()
        if self._held:
            found["held"] = {str(group): self._row_of[group] for group in sorted(self._held)}
        if self.returned:
            found["returned"] = list(self.returned)
        if self._left_out:
            found["left_out"] = sorted(self._left_out)
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where the feed that returned `state` stopped. Prompts that partial rollouts held
        are dealt again, first and with new numbers, if this run has no `rollout.partial`.

        Raises:
            DataError: if the data or its order is another.
        """
        self.deck.load_state(state)
        self._ahead = None
        self._deals.clear()
        self.numbered = int(state["numbered"])
        if self._examples is not None and "examples" in state:
            self._examples.restore(state["examples"])
        self._row_of = {int(group): row for group, row in state.get("held", {}).items()}
        self._held = set(self._row_of)
        self._left_out |= set(state.get("left_out", ()))  # also what was found since
        returned = list(state.get("returned", ()))
        if self.config.rollout.partial is None:
            returned += self._row_of.values()
            self._row_of, self._held = {}, set()
        self.returned = [row for row in returned if row not in self._left_out]

    def _next_rows(self) -> Rows:
        """Return the next rows that are not excluded, at least one, beginning with those that were
        returned."""
        number = self.config.data.prompts_per_step
        first = np.array(self.returned[:number], np.int64)
        if len(first) == number:
            return first
        for _ in range(_MAX_DRAWS):
            rows = self.deck.deal(number - len(first))
            rows = np.concatenate([first, rows[~np.isin(rows, list(self._left_out))]])
            if len(rows):
                return rows
        raise DataError(
            f"{len(self._left_out)} of the {len(self.data)} rows of the data are left out, because "
            "steps that learned from them were not finite (guard.on_nan=rewind), and no others "
            "came. Look at bad-steps/ of the run: it is not the data's fault."
        )

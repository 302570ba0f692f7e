"""Columns of a batch as the loss reads them: a number for each response token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybridrl.batch.batch import Batch, Ragged
from hybridrl.errors import DataError, nearest

MADE_BY = {
    "response_mask": "the generation, or the data of `update_supervised`",
    "loss_weights": "`hybridrl.trainers.update_columns.loss_weights`, applied to the batch",
    "advantages": "an advantage estimator, applied to the scores (`batch.apply`)",
    "log_probs": "`actor.compute_log_prob`",
    "rollout_log_probs": "the generation",
    "ref_log_probs": "`reference.compute_ref_log_prob`",
    "values": "`critic.compute_values`",
    "cost_values": "`cost_critic.compute_values`",
    "returns": "an advantage estimator with values, such as `gae`",
    "cost_returns": "an advantage estimator with values, such as `gae`",
}
"""Where the columns come from that the library's losses read."""


def token_places(cu_seqlens: Tensor, rows: list[int]) -> Tensor:
    """Where the tokens of these rows lie in a ragged column's values, row after row."""
    starts, lengths = cu_seqlens[:-1][rows], cu_seqlens.diff()[rows]
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


class TokenColumns(Mapping[str, Tensor]):
    """Every numeric column as `[response tokens]` on the device: token-level columns as they are,
    per-sample numbers repeated over the sample's tokens. They are copies, so a loss may change
    them.

    Raises:
        DataError: when a column is read that is not there, or does not have a number for each
            response token; names it, and what makes it.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        lengths = torch.from_numpy(batch.lengths("response_ids"))
        self._columns: dict[str, Tensor] = {}
        self._unfit: dict[str, str] = {}
        for name in batch.columns:
            values = batch[name]
            if isinstance(values, Tensor):
                self._columns[name] = values.repeat_interleave(lengths).to(device)
            elif isinstance(values, Ragged):
                if torch.equal(values.lengths, lengths):
                    self._columns[name] = values.values.to(device, copy=True)
                else:
                    self._unfit[name] = _difference(values.lengths, lengths)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            raise self._missing(name)
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        if name in self._unfit and name in MADE_BY:  # leaving it out would change what is learned
            raise self._missing(str(name))
        return name in self._columns

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        return self._columns[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def _missing(self, name: str) -> DataError:
        maker = f" It is made by {MADE_BY[name]}." if name in MADE_BY else ""
        if name in self._unfit:
            return DataError(
                f"The loss reads the column `{name}`, which does not have a number for each "
                f"response token: {self._unfit[name]}.{maker}"
            )
        return DataError(
            f"The loss reads the column `{name}`, which the batch of this update does not have; it "
            f"has {', '.join(self._columns)}.{maker}{nearest(name, self._columns)}"
        )


def token_columns(batch: Batch, device: torch.device) -> TokenColumns:
    """The columns of a micro-batch for the loss."""
    return TokenColumns(batch, device)


def _difference(found: Tensor, wanted: Tensor) -> str:
    row = int((found != wanted).nonzero()[0])
    return f"a row has {int(found[row])} values and a response of {int(wanted[row])} tokens"

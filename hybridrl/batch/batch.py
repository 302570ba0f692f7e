"""The table of samples that every room of HybridRL passes around.

One row per sample, named columns, held in Arrow. A token-level column is a ragged list (values and
offsets), so nothing is ever padded in memory, on the wire or on disk. Numeric columns are views of
the Arrow buffers: reading one copies nothing, and because others read the same memory, the tensors
refuse to be changed in place (see `arrow_columns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from hybridrl.batch.arrow_columns import (
    RaggedColumn,
    is_numeric_type,
    is_ragged_type,
    python_values,
    to_arrow,
    to_ragged,
    to_tensor,
)
from hybridrl.batch.kept_sets import KEPT_SETS
from hybridrl.errors import DataError, suggest_name

ROUTED_EXPERTS = "routed_experts"
"""Which experts took each token but a sample's last, in all layers one after the other."""
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""The tokens that a teacher finds likeliest in the place of each response token, as many for every
one, one token after the other."""
TEACHER_CHUNKS = "teacher_chunks"
"""The chunk of each response token, counted from 0: a text of whole tokens of the student and of
the teacher; -1: none."""
SOURCE_COLUMN = "source"
"""The source in `data.sources` that a row is of."""
MASKS = ("response_mask", "branch_response_mask")
"""Which tokens the model sampled: of a sample's last branch, and of those before."""
LIBRARY_COLUMNS = frozenset(
    {
        # of tokens
        *("prompt_ids", "response_ids", "response_mask", "token_versions", ROUTED_EXPERTS),
        *("rollout_log_probs", "log_probs", "ref_log_probs", "entropy", "values", "cost_values"),
        *("returns", "cost_returns", "advantages", "loss_weights"),
        *(TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_CHUNKS, "turn"),
        # of samples
        *("group_id", "policy_version", "scores", "shaped_scores", "costs", "greedy_scores"),
        *("response", "episode", "branch", "branches", "carried"),
        *("branch_prompt_ids", "branch_prompt_lengths", "branch_response_lengths"),
        *("branch_response_ids", "branch_response_mask", "branch_rollout_log_probs"),
        *("branch_turn", "branch_token_versions", KEPT_SETS, f"branch_{KEPT_SETS}"),
        *("outcomes", "step_ends", "step_rewards"),
        # of rows, until a job begins
        *("conversation_number", "prompt_tokens_key", "prompt_text_key", "row_tokens_key"),
    }
)
"""The columns that the library makes and reads under these names: the user's functions do not get
them among their row, and a column of the data should not be called so."""
LIBRARY_PREFIXES = ("reward/", "cost/", "check/", "environment/")
"""How further columns of the library's begin: one for each function, and its further numbers; those
of functions that are only looked at begin with `check/`, those of an environment with
`environment/`."""


def is_user_column(column: str) -> bool:
    """Return whether a column of this name belongs to the user's data and not to the library."""
    return column not in LIBRARY_COLUMNS and not column.startswith(LIBRARY_PREFIXES)


def sampled_tokens(batch: Batch) -> torch.Tensor:
    """Return the number of tokens of each row that the model sampled, in all branches, `[rows]`:
    what tools and environments said is off the `response_mask`."""
    found = torch.zeros(len(batch), dtype=torch.int64)
    for name in MASKS:
        if name in batch:
            mask, bounds = batch.ragged(name)
            sums = torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))
            found += sums[bounds[1:]] - sums[bounds[:-1]]
    return found


_MIN_RUN = 8
"""Average length of runs of rows that are worth a slice each."""


class Batch:
    """An immutable table of samples.

    `batch["scores"]` gives a tensor, `batch["response_ids"]` a `RaggedColumn`, `batch["answer"]` a
    list of strings. Every operation returns a new batch that shares the old one's buffers.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Batch:
        """Build a batch from tensors, arrays, `RaggedColumn`s, lists of 1-D tensors, or plain
        lists.

        A tensor `[rows, k]` becomes a column of lists, as a `RaggedColumn` does.

        Raises:
            DataError: if the columns do not have one length, or one cannot be stored; names the
                column.
        """
        arrays = {}
        for name, values in columns.items():
            try:
                arrays[name] = to_arrow(values)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                raise DataError(f"The column `{name}` cannot be stored: {error}") from error
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"The columns of a batch must have one length, these differ: {sizes}.")
        return cls(pa.table(arrays))

    @property
    def columns(self) -> list[str]:
        """The column names, in order."""
        return list(self.table.column_names)

    @property
    def nbytes(self) -> int:
        """The number of bytes of this batch's rows, without the rest of shared buffers."""
        return int(self.table.nbytes)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.table.column_names

    def __reduce__(self) -> tuple[type[Batch], tuple[pa.Table]]:
        table = self.table
        if table.nbytes < 0.9 * table.get_total_buffer_size():
            table = table.take(np.arange(len(self)))  # a slice: pickle would send the rest as well
        return Batch, (table,)

    def __repr__(self) -> str:
        fields = ", ".join(f"{field.name}: {field.type}" for field in self.table.schema)
        return f"Batch({len(self)} rows; {fields})"

    def array(self, name: str) -> pa.Array:
        """Return the column as one Arrow array."""
        self._check_name(name)
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

    def _check_name(self, name: str) -> None:
        if name not in self:
            raise DataError(
                f"The batch has no column `{name}`; it has {', '.join(self.columns)}."
                + suggest_name(name, self.columns)
            )

    def __getitem__(self, name: str) -> Any:
        array = self.array(name)
        if is_ragged_type(array.type):
            return to_ragged(array)
        if is_numeric_type(array.type):
            return to_tensor(array)
        return python_values(array)

    def ragged(self, name: str) -> RaggedColumn:
        """Return the token-level column `name`; raise `DataError` if it holds one value per row."""
        array = self.array(name)
        if pa.types.is_null(array.type) and not len(array):  # made of no rows, it has no type
            array = pa.array([], pa.large_list(pa.int64()))
        if not is_ragged_type(array.type):
            raise DataError(f"The column `{name}` holds one value per sample, not one per token.")
        return to_ragged(array)

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Return the number of values in each row of the token-level column `name`, `[rows]`."""
        if len(self.pieces) > 1:
            return np.concatenate([piece.lengths(name) for piece in self.pieces])
        return np.asarray(self.ragged(name).lengths.numpy(), dtype=np.int64)

    @cached_property
    def pieces(self) -> list[Batch]:
        """The rows in batches whose columns lie in one piece of memory each, without a copy: those
        of a table that is mapped from a file and larger than the memory."""
        return [Batch(pa.Table.from_batches([piece])) for piece in self.table.to_batches()]

    def padded(self, name: str, fill: float = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column as `[rows, longest]`, left-aligned, and the bool mask of its real
        values."""
        values, cu_seqlens = self.ragged(name)
        lengths = cu_seqlens.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        dense = torch.full(mask.shape, fill, dtype=values.dtype)
        dense[mask] = values
        return dense, mask

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch of these columns only."""
        names = list(names)
        for name in names:
            self._check_name(name)
        return Batch(self.table.select(names))

    def with_columns(self, columns: Mapping[str, Any]) -> Batch:
        """Return this batch with the columns added; a column of the same name is replaced."""
        return self | Batch.from_columns(columns)

    def __or__(self, other: Batch) -> Batch:
        """Join two batches row by row; the right one wins where both have a column."""
        if not isinstance(other, Batch):
            return NotImplemented
        if len(self) != len(other):
            raise DataError(
                f"Only batches of equally many rows join row by row: {len(self)} and {len(other)}."
            )
        merged = {name: self.table.column(name) for name in self.columns}
        merged |= {name: other.table.column(name) for name in other.columns}
        return Batch(pa.table(merged))

    def take(self, rows: RowNumbers) -> Batch:
        """Return the rows with these numbers, in this order, or those where a mask is true (see
        `resolve_row_numbers`). Consecutive rows are not copied."""
        rows = resolve_row_numbers(rows, len(self))
        if len(rows) and (np.diff(rows) == 1).all():
            return self.slice(int(rows[0]), int(rows[-1]) + 1)
        if len(self.pieces) > 1:
            return self._take_of_pieces(rows)
        return Batch(self.table.take(pa.array(rows)).combine_chunks())

    def _take_of_pieces(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Arrow's own `take` would first put all pieces together in memory. Long runs are not
        copied."""
        ends = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        runs = [self.table.slice(rows[a], b - a) for a, b in pairwise(ends) if b]
        table = pa.concat_tables([self.table.slice(0, 0), *runs])
        return Batch(table if _MIN_RUN * len(runs) < len(rows) else table.combine_chunks())

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows `start` to `stop` (exclusive) without copying."""
        return Batch(self.table.slice(start, stop - start))

    @staticmethod
    def concat(
        batches: Sequence[Batch], *, fill_missing: bool = False, in_one_piece: bool = True
    ) -> Batch:
        """Concatenate batches row-wise.

        Args:
            fill_missing: A column that some batches do not have is NaN there if it holds numbers
                with a fraction, and empty otherwise. Without it all must have the same columns.
            in_one_piece: Copy the rows to one piece of memory; see `pieces`.

        Raises:
            DataError: if there is no batch, or the columns are not the same; names them.
        """
        if not batches:
            raise DataError("Batch.concat needs one batch or more, and was given none.")
        if len(batches) == 1:
            return batches[0]
        names = list(dict.fromkeys(name for batch in batches for name in batch.columns))
        partial = [name for name in names if not all(name in batch for batch in batches)]
        if partial and not fill_missing:
            having = [n for n, batch in enumerate(batches) if partial[0] in batch]
            raise DataError(
                "Only batches with the same columns can be put one below the other; "
                f"{', '.join(f'`{name}`' for name in partial)} is not in all of them (of "
                f"{len(batches)} batches, `{partial[0]}` is in {_numbers(having)}, counted from "
                "0). Select the same columns of each."
            )
        try:
            table = pa.concat_tables([b.table for b in batches], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"These batches cannot be put one below the other: {error}. A column has to hold "
                "the same kind of values in each."
            ) from error
        table = table.select(names)
        for name in partial:
            if pa.types.is_floating(table.schema.field(name).type):
                filled = pc.fill_null(table.column(name), float("nan"))
                table = table.set_column(table.column_names.index(name), name, filled)
        return Batch(table.combine_chunks() if in_one_piece else table)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return one dictionary per row."""
        return _rows_of(self.table)

    def rows_for_users(self) -> list[dict[str, Any]]:
        """Return one dictionary per row with the columns that user functions get: all but the
        library's own (`LIBRARY_COLUMNS`)."""
        return _rows_of(self.table.select(list(filter(is_user_column, self.columns))))


def _rows_of(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist()
    for name in (field.name for field in table.schema if isinstance(field.type, pa.JsonType)):
        for row, cell in zip(rows, python_values(table.column(name)), strict=True):
            row[name] = cell
    return rows


RowNumbers = Sequence[int] | Sequence[bool] | npt.NDArray[Any] | torch.Tensor
"""Numbers of rows, or a mask of all rows."""


def resolve_row_numbers(rows: RowNumbers, count: int | None) -> npt.NDArray[np.int64]:
    """Return row numbers as an int64 array: the numbers given, or the positions where a boolean
    mask is true.

    Args:
        count: Rows of the table; None: not known yet.

    Raises:
        DataError: for a mask of another length, for what is no whole number, and for a row that
            is not there.
    """
    numbers = rows.detach().cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows)
    known = "" if count is None else f" of a batch of {count} rows"
    if numbers.ndim != 1:
        raise DataError(f"Row numbers are a list, and this has the shape {list(numbers.shape)}.")
    if numbers.dtype == np.bool_:
        if count is not None and len(numbers) != count:
            raise DataError(
                f"A mask of {len(numbers)} booleans cannot choose among the rows{known}: it needs "
                "one for each."
            )
        return np.flatnonzero(numbers)
    if len(numbers) and numbers.dtype.kind not in "iu":
        raise DataError(
            f"Rows are chosen by whole numbers or by a mask of booleans, and these are "
            f"{numbers.dtype}: {numbers[:3].tolist()}."
        )
    numbers = numbers.astype(np.int64)
    if len(numbers) and numbers.min() < 0:
        raise DataError(
            f"There is no row {numbers.min()}{known}: rows are counted from 0, and a negative "
            "number does not count from the end."
        )
    if count is not None and len(numbers) and numbers.max() >= count:
        raise DataError(f"There is no row {numbers.max()}{known}, which are counted from 0.")
    return numbers


def _numbers(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:5]))
    return shown if len(values) <= 5 else f"{shown}, ..."


OUTCOMES = "outcomes"
"""The column of scores without the rewards of steps."""


def outcomes_of(batch: Batch) -> Tensor:
    """Return the outcome of each sample, NaN where it was dropped: its score without rewards of
    steps, lengths or shaping. Where a worker of the user's gives scores only, these."""
    found: Tensor = batch[OUTCOMES if OUTCOMES in batch else "scores"]
    return found


def is_right(outcomes: float | Tensor | npt.NDArray[Any], correct_at: float) -> Any:
    """Return whether outcomes are `correct_at` or more, of the same shape; NaN is not.

    Outcomes have 32 bits, in which 0.7 is a little less than Python's 0.7: so has the bound.
    """
    return outcomes >= float(np.float32(correct_at))

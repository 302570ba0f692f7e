"""Rows that cannot be read: an error, or left out and counted by reason (`data.bad_rows`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from hybridrl.data.row_origin import DATA, DataRow, RowOrigin
from hybridrl.errors import DataError, RowError

if TYPE_CHECKING:
    import pyarrow as pa

    from hybridrl.config.schema import DataConfig

Found = TypeVar("Found")
RowCheck: TypeAlias = "Callable[[DataConfig, pa.Table, RefusedRows], None]"

_watch: ContextVar[tuple[RowCheck | None, list[RefusedRows]]] = ContextVar("watch of rows")
_log = logging.getLogger(__name__)


@contextmanager
def collected(check: RowCheck | None = None) -> Iterator[list[RefusedRows]]:
    """Within the context, have rows of files checked before they are tokenized, and collect the
    rows that are left out of data, an entry for each table."""
    found: list[RefusedRows] = []
    token = _watch.set((check, found))
    try:
        yield found
    finally:
        _watch.reset(token)


def check_rows(settings: DataConfig, rows: pa.Table, refused: RefusedRows) -> None:
    """Have rows that are read with these settings checked; see `collected`."""
    check, _ = _watch.get((None, []))
    if check is not None:
        check(settings, rows, refused)


class RefusedRows:
    """The rows of one table that are refused, and why.

    The stages that read a table share one: a row that a stage refuses is skipped by the next ones,
    and keeps its place, so that columns stay aligned and rows keep their numbers, until `kept`
    says which rows are left.

    Args:
        place: What the rows are of, for messages.
        drop: Leave refused rows out; otherwise they are an error.
        limit: The largest share of rows that may be left out.
        origin: The settings that they are read by.
        before: Number of rows before those of a part of a table, of which only the whole can say
            what is left; None: it is a whole table.
        waits: All stages read what they can before refused rows are an error, which then counts
            those of all stages: `tell` raises it, or `merge` of several parts.

    Attributes:
        left_out: Columns that are left out of the table, each with the sentence that says why.
    """

    def __init__(
        self,
        place: str = "the data",
        drop: bool = False,
        limit: float = 1.0,
        origin: RowOrigin = DATA,
        before: int | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.place, self.origin = place, origin
        self.is_part, self.first = before is not None, before or 0
        self._drop, self._limit, self._waits = drop, limit, waits
        self._errors: dict[int, DataError] = {}
        self._rows = 0
        self._sums: dict[tuple[Any, ...], npt.NDArray[np.int64]] = {}
        self._doubts: list[tuple[int, str]] = []
        self.left_out: dict[str, str] = {}

    def refuse(self, number: int, error: DataError) -> None:
        """Note that a row, counted from 1, is refused; the first error of a row counts."""
        self._errors.setdefault(number, error.with_traceback(None))

    def map(self, read: Callable[..., Found], *columns: Sequence[Any]) -> list[Found | None]:
        """Call `read(row, *cells)` for each row that is not refused yet; a `DataError` refuses the
        row, in whose place there is None."""
        found: list[Found | None] = []
        for number, cells in enumerate(zip(*columns, strict=True), start=1):
            result = None
            if number not in self._errors:
                try:
                    result = read(self.row(number), *cells)
                except DataError as error:
                    self.refuse(number, error)
            found.append(result)
        return found

    def row(self, number: int) -> DataRow:
        """Return a row by its number, for sentences about it."""
        return DataRow(number + self.first, self.origin)

    def warn(
        self, sentence: str, numbers: Sequence[int], *words: Any, unless_all: bool = False
    ) -> None:
        """Log a sentence of the numbers and words, or, for a part, keep it until the numbers of all
        parts are added up. The first number counts the rows that the sentence is about: it is not
        logged if there are none; nor, with `unless_all`, if that are all of the second number."""
        if self.is_part:
            key = (sentence, unless_all, *(w if isinstance(w, int) else str(w) for w in words))
            self._sums[key] = self._sums.get(key, 0) + np.array(numbers)
        elif numbers[0] and not (unless_all and numbers[0] == numbers[1]):
            _log.warning(sentence, *numbers, *words)

    def doubt(self, error: DataError, least: int = 0) -> None:
        """Raise an error that holds if it holds for all rows, unless refused rows are one; of a
        part, keep it until it is known of all parts, of which that with the least number has its
        sentence raised."""
        if not self.is_part:
            self._check()
            raise error
        self._doubts.append((least, str(error)))

    def leave_out(self, name: str, why: str) -> None:
        """Note that a column is left out, and log the sentence that says why; of several parts, the
        first one's."""
        if name not in self.left_out and not self.is_part:
            _log.warning("%s", why)
        self.left_out.setdefault(name, why)

    def export(self) -> dict[str, Any]:
        """Return what is known of a part, as plain data."""
        return {
            "rows": self._rows,
            "errors": [[n + self.first, str(e), _reason(e)] for n, e in self._errors.items()],
            "sums": [[key, numbers.tolist()] for key, numbers in self._sums.items()],
            "doubts": self._doubts[:1],
            "left_out": self.left_out,
        }

    def merge(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Take over what is known of the parts of this table (`export`), and raise and log what
        holds for the whole."""
        sums: dict[tuple[Any, ...], Any] = {}
        for part in parts:
            self._errors |= {n: RowError(text, reason) for n, text, reason in part["errors"]}
            for name, why in part["left_out"].items():
                self.leave_out(name, why)
            for key, numbers in part["sums"]:
                sums[tuple(key)] = sums.get(tuple(key), 0) + np.array(numbers)
        self._rows = sum(part["rows"] for part in parts)
        self._check()
        for (sentence, unless_all, *words), numbers in sums.items():
            self.warn(sentence, numbers.tolist(), *words, unless_all=unless_all)
        if all(part["doubts"] for part in parts):
            raise DataError(min(part["doubts"][0] for part in parts)[1])

    def kept(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the numbers, from 0, of the rows that are not refused.

        Args:
            rows: Number of rows of the table.

        Raises:
            DataError: as `tell`, unless this waits and a row is left.
        """
        self._rows = rows
        if not self.is_part and (not self._waits or len(self._errors) == rows):
            self._check()
        return np.array([n for n in range(rows) if n + 1 not in self._errors], np.int64)

    def _check(self) -> None:
        rows, refused = self._rows, len(self._errors)
        if refused and not self._drop:
            first = self._errors[min(self._errors)]
            count = "1 row is" if refused == 1 else f"{refused} rows are"
            few = refused < rows and refused <= self._limit * rows
            cure = f" {self.origin / 'bad_rows'}=drop leaves them out." if few else ""
            raise type(first)(
                f"{str(first).rstrip()} ({count} refused of {rows}: {self._counts()}.{cure})"
            ) from first
        if refused > self._limit * rows or (refused and refused == rows):
            raise DataError(
                f"{refused} of the {rows} rows of {self.place} are refused, more than "
                f"{self.origin / 'bad_rows_limit'}={self._limit} allows to leave out: "
                f"{self._counts()}. {self._examples()}"
            )

    def tell(self) -> None:
        """Log how many rows are left out, by reason, with the first row of each; whoever collects
        them (`collected`) gets them.

        Raises:
            DataError: if a row is refused and none may be left out, or more than `limit` allows.
        """
        self._check()
        if self._errors:
            _watch.get((None, []))[1].append(self)
            _log.warning(
                "Left out %d of the %d rows of %s (%s=drop): %s. %s",
                len(self._errors),
                self._rows,
                self.place,
                self.origin / "bad_rows",
                self._counts(),
                self._examples(),
            )

    def figures(self) -> dict[str, Any]:
        """Return the counts by reason, with the first sentence of each, for `data-report.json`."""
        reasons = {
            reason: {"rows": len(numbers), "first": str(self._errors[numbers[0]])}
            for reason, numbers in self._by_reason().items()
        }
        return {"rows": self._rows, "left_out": len(self._errors), "reasons": reasons}

    def _by_reason(self) -> dict[str, list[int]]:
        """Return the numbers of rows by reason, the most frequent reason first."""
        found: dict[str, list[int]] = {}
        for number in sorted(self._errors):
            error = self._errors[number]
            found.setdefault(_reason(error), []).append(number)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def _counts(self) -> str:
        return ", ".join(f"{len(rows)} {reason}" for reason, rows in self._by_reason().items())

    def _examples(self) -> str:
        return " ".join(str(self._errors[rows[0]]) for rows in self._by_reason().values())


def _reason(error: DataError) -> str:
    return error.reason if isinstance(error, RowError) else "malformed"

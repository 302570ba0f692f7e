"""Shards: the pieces of a table, each where it was made, and what is known of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybridrl.batch.batch import Batch

ANY = "*"
"""The pattern of which nothing is said."""


@dataclass(frozen=True)
class Columns:
    """The columns that a call makes, as far as its method says.

    Attributes:
        certain: Names of columns that will be there.
        possible: Patterns of names that may be there besides: `reward/*`; `*` is any name.
    """

    certain: frozenset[str] = frozenset()
    possible: tuple[str, ...] = ()

    def may_have(self, name: str) -> bool:
        """Whether a column of this name may be there."""
        return name in self.certain or any(fnmatchcase(name, known) for known in self.possible)

    def may_lack(self, names: Iterable[str]) -> bool:
        """Whether the method says of each of these that it is there at times only."""
        said = [known for known in self.possible if known != ANY]
        return all(any(fnmatchcase(name, known) for known in said) for name in names)

    def __or__(self, other: Columns) -> Columns:
        patterns = dict.fromkeys((*self.possible, *other.possible))
        return Columns(self.certain | other.certain, tuple(patterns))

    def __str__(self) -> str:
        return ", ".join([*sorted(self.certain), *self.possible]) or "no columns"


UNKNOWN = Columns(possible=(ANY,))
"""Of a call whose method does not say what it makes."""


def any_column(name: str) -> bool:
    """A choice of columns: all."""
    return True


@dataclass(frozen=True)
class Wanted:
    """The columns that somebody is going to read.

    Attributes:
        names: Columns that have to be there.
        others: Which further columns are read where they are there.
        following: Columns that are read where they are there, selected or not.
        found: Columns that have been found in another table already.
    """

    names: frozenset[str] = frozenset()
    others: Callable[[str], bool] | None = None
    following: frozenset[str] = field(default=frozenset())
    found: frozenset[str] = field(default=frozenset())

    def may_be_in(self, columns: Columns) -> bool:
        """Whether a table of these columns may have a wanted one, so that it must be read."""
        if any(columns.may_have(name) for name in (self.names | self.following) - self.found):
            return True
        others = self.others
        if others is None:
            return False
        further = (*(columns.certain - self.found), *columns.possible)
        return any(name == ANY or others(name) for name in further)

    def without(self, found: Iterable[str]) -> Wanted:
        """What is wanted beyond these columns."""
        return replace(self, found=self.found.union(found))


COUNTED = ("prompt_ids", "response_ids")
"""The columns whose tokens are balanced over the ranks."""
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardInfo:
    """What may be known of a shard without fetching it.

    Attributes:
        rows: The numbers of its rows in their table.
        schema: Names and types of its columns.
        tokens: Tokens of each of its `COUNTED` columns by row.
        total: How many rows the table has in all; None: as many as the shards beside it.
        sizes: Bytes of each column.
    """

    rows: Rows
    schema: pa.Schema
    tokens: dict[str, Rows]
    total: int | None = None
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, rows: Rows, total: int | None = None) -> ShardInfo:
        """Describes `batch` as the shard that holds `rows` of its table."""
        tokens = {name: batch.lengths(name) for name in COUNTED if name in batch}
        sizes = tuple(column.nbytes for column in batch.table.columns)
        return cls(rows, batch.table.schema, tokens, total, sizes)

    def bytes_of(self, rows: int, names: Sequence[str]) -> float:
        """About as many as so many rows of these columns have."""
        wanted = set(names)
        size = sum(
            s for name, s in zip(self.schema.names, self.sizes, strict=True) if name in wanted
        )
        return size * rows / max(1, len(self.rows))


def count_tokens(batch: Batch) -> int:
    """Tokens of the `COUNTED` columns of all rows."""
    return sum(int(batch.lengths(name).sum()) for name in COUNTED if name in batch)


class Shards(ABC):
    """What one call returned: a shard from each rank that answered, in any order of rows.

    Attributes:
        columns: The columns that the call makes, as far as it is known beforehand.
        rows: Rows of the table, if it is known beforehand.
    """

    def __init__(self, columns: Columns, rows: int | None) -> None:
        self.columns = columns
        self.rows = rows

    @abstractmethod
    def infos(self) -> Sequence[ShardInfo]:
        """What the shards say of themselves; waits for the call."""

    @abstractmethod
    def batch(self, index: int) -> Batch:
        """A shard's rows, all of them."""

    def read(self, index: int, rows: Rows, names: Sequence[str]) -> Batch:
        """These columns of these rows of a shard, by their places in it."""
        return self.batch(index).select(names).take(rows)

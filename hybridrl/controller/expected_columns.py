"""What is known of a table's columns before the calls that make them are done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

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

"""Rows chosen again and again, and tables put one below the other, without piling up expressions.

A table that is kept for many steps, such as a replay buffer, is made of what was kept of it before
and what is new. What nobody can read any more is let go here, so that it does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from hybridrl.controller.row_selection import Part, Repeat, Take
from hybridrl.controller.shards import Rows
from hybridrl.controller.table_expression import Choose, Concat, Join, Node


def join(left: Node, right: Node) -> Node:
    """`Join`, without the tables of the left side that the right one replaces altogether, so that
    a table whose columns are made anew step by step does not pile up old ones."""
    whole = Join(left, right)
    if left.known_rows is None or right.known_rows is None:
        return whole  # whether they are as many shows when the tables are read
    kept = [table for table in left.joined() if not _is_replaced(table, right)]
    if len(kept) == len(left.joined()):
        return whole
    return reduce(Join, [*kept, right])


def _is_replaced(table: Node, by: Node) -> bool:
    return not table.columns.possible and table.columns.certain <= by.columns.certain


def choose(table: Node, choice: Take | Repeat | Part) -> Node:
    """`Choose`, but of what was chosen before only the rows that are chosen again: tables that have
    none of them are let go, and rows that are kept for many steps do not pile up expressions."""
    if not isinstance(choice, Take) or (found := _pieces(table)) is None:
        return Choose(table, choice)
    pieces, rows = found
    rows = rows[choice.numbers]
    if len(pieces) == 1:
        return Choose(pieces[0], Take(rows))
    starts = np.cumsum([0, *(piece.known_rows for piece in pieces)])
    owner = np.searchsorted(starts, rows, side="right") - 1
    used = np.unique(owner) if len(rows) else np.array([0])
    kept = [pieces[number] for number in used]
    shift = np.zeros(len(pieces), np.int64)
    shift[used] = starts[used] - np.cumsum([0, *(piece.known_rows for piece in kept[:-1])])
    joined = kept[0] if len(kept) == 1 else Concat(tuple(kept))
    return Choose(joined, Take(rows - shift[owner]))


def concat(tables: Sequence[Node]) -> Node:
    """`Concat`, of the tables that the rows were chosen from."""
    whole = Concat(tuple(tables))
    if (found := _pieces(whole)) is None:
        return whole
    pieces, rows = found
    whole = Concat(tuple(pieces))
    return whole if len(rows) == whole.known_rows and _is_range(rows) else Choose(whole, Take(rows))


def _pieces(node: Node) -> tuple[list[Node], Rows] | None:
    """The tables that a choice of rows is made from, one below the other, and the numbers of its
    rows there; None if they are not known beforehand."""
    if (count := node.known_rows) is None:
        return None
    if isinstance(node, Choose) and isinstance(node.choice, Take) and node.choice.of is None:
        found = _pieces(node.table)
        return None if found is None else (found[0], found[1][node.choice.numbers])
    if not isinstance(node, Concat):
        return [node], np.arange(count)
    pieces, rows, start = [], [np.arange(0)], 0
    for table in node.tables:
        found = _pieces(table)
        assert found is not None  # as the rows of all are known
        pieces += found[0]
        rows.append(found[1] + start)
        start += sum(piece.known_rows for piece in found[0])
    return pieces, np.concatenate(rows)


def _is_range(rows: Rows) -> bool:
    return bool((rows == np.arange(len(rows))).all())

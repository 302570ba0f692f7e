"""Operations on tables: each returns an expression that stays small, however many steps its rows
are kept for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from hybridrl.controller.group_call import Rows
from hybridrl.controller.row_selections import IndexSelection, PartitionSelection, RepeatSelection
from hybridrl.controller.table_expression import (
    ConcatenatedTable,
    JoinedTable,
    SelectedTable,
    TableExpression,
)


def join(left: TableExpression, right: TableExpression) -> TableExpression:
    """Join two tables without those of the left side whose columns the right side replaces, so that
    columns made anew in every step do not pile up."""
    whole = JoinedTable(left, right)
    if left.known_rows is None or right.known_rows is None:
        return whole  # whether they are as many shows when the tables are read
    kept = [table for table in left.joined() if not _is_replaced(table, right)]
    if len(kept) == len(left.joined()):
        return whole
    return reduce(JoinedTable, [*kept, right])


def _is_replaced(table: TableExpression, by: TableExpression) -> bool:
    return not table.columns.possible and table.columns.certain <= by.columns.certain


def choose(
    table: TableExpression, choice: IndexSelection | RepeatSelection | PartitionSelection
) -> TableExpression:
    """Select rows, and merge the selection with earlier ones: tables without selected rows are
    dropped, so that rows kept for many steps do not pile up expressions."""
    if not isinstance(choice, IndexSelection) or (found := _pieces(table)) is None:
        return SelectedTable(table, choice)
    pieces, rows = found
    rows = rows[choice.numbers]
    copies = choice.copies
    if len(pieces) == 1:
        return SelectedTable(pieces[0], IndexSelection(rows, copies=copies))
    starts = np.cumsum([0, *(piece.known_rows for piece in pieces)])
    owner = np.searchsorted(starts, rows, side="right") - 1
    used = np.unique(owner) if len(rows) else np.array([0])
    kept = [pieces[number] for number in used]
    shift = np.zeros(len(pieces), np.int64)
    shift[used] = starts[used] - np.cumsum([0, *(piece.known_rows for piece in kept[:-1])])
    joined = kept[0] if len(kept) == 1 else ConcatenatedTable(tuple(kept))
    return SelectedTable(joined, IndexSelection(rows - shift[owner], copies=copies))


def concatenate_tables(tables: Sequence[TableExpression]) -> TableExpression:
    """Concatenate the tables that the rows were selected from."""
    whole = ConcatenatedTable(tuple(tables))
    if (found := _pieces(whole)) is None:
        return whole
    pieces, rows = found
    whole = ConcatenatedTable(tuple(pieces))
    return (
        whole
        if len(rows) == whole.known_rows and _is_range(rows)
        else SelectedTable(whole, IndexSelection(rows))
    )


def _pieces(node: TableExpression) -> tuple[list[TableExpression], Rows] | None:
    """Return the source tables of a row selection and the indices of its rows in their
    concatenation; None if row counts are not known yet."""
    if (count := node.known_rows) is None:
        return None
    if (
        isinstance(node, SelectedTable)
        and isinstance(node.choice, IndexSelection)
        and node.choice.of is None
    ):
        found = _pieces(node.table)
        return None if found is None else (found[0], found[1][node.choice.numbers])
    if not isinstance(node, ConcatenatedTable):
        return [node], np.arange(count)
    pieces, rows, start = [], [np.arange(0)], 0
    for table in node.tables:
        found = _pieces(table)
        assert found is not None  # as the rows of all are known
        pieces += found[0]
        rows.append(found[1] + start)
        start += sum(piece.known_rows or 0 for piece in found[0])
    return pieces, np.concatenate(rows)


def _is_range(rows: Rows) -> bool:
    return bool((rows == np.arange(len(rows))).all())

"""What to do with rows that are too long: refuse them, or leave them out and say so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from hybridrl.data.encoding import TokenIds, excerpt
from hybridrl.data.row_origin import DATA, DataRow, RowOrigin
from hybridrl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

TooLong = Literal["error", "drop"]


def rows_within(
    what: Literal["prompt", "response"],
    encoded: Sequence[TokenIds],
    limit: int | None,
    texts: Sequence[str],
    too_long: TooLong,
    among: npt.NDArray[np.int64],
    numbers: Sequence[int] | None = None,
    *,
    origin: RowOrigin = DATA,
) -> npt.NDArray[np.int64]:
    """The numbers (from 0) of the rows with at most `limit` tokens, in order; of those of `among`.

    Args:
        limit: `max_<what>_tokens`; None keeps all rows.
        texts: Of the rows, for messages.
        numbers: Of the rows, for messages; None: they count from 1.
        too_long: `error` refuses a longer row, `drop` leaves it out and logs how many it were.

    Raises:
        DataError: if a row is too long and `too_long` is `error`, or no row is left.
        ConfigError: if `too_long` is neither.
    """
    setting, drop = origin / f"max_{what}_tokens", origin / "too_long"
    if too_long not in ("error", "drop"):
        raise ConfigError(f"`{drop}` is `{too_long}`, expected `error` or `drop`.")
    lengths = np.array([len(ids) for ids in encoded])
    if limit is None:
        return among
    mine = lengths[among]
    kept = among[mine <= limit]
    dropped = len(mine) - len(kept)
    if dropped and too_long == "error":
        first = int(among[mine > limit][0])
        number = first + 1 if numbers is None else numbers[first]
        raise DataError(
            f"{DataRow(number, origin)} has a {what} of {lengths[first]} tokens, more than "
            f"`{setting}` ({limit}); {dropped} of {len(mine)} rows are too long, the longest has "
            f"{mine.max()}. Raise `{setting}`, or set `{drop}=drop`. The {what} begins: "
            f"{excerpt(texts[first])}"
        )
    if not len(kept):
        raise DataError(
            f"`{drop}=drop` dropped all {dropped} rows: the shortest {what} has {mine.min()} "
            f"tokens and `{setting}` is {limit}. Raise it."
        )
    if dropped:
        _log.warning(
            "Dropped %d of %d %ss that have more than %d tokens (`%s`).",
            dropped,
            len(mine),
            what,
            limit,
            setting,
        )
    return kept

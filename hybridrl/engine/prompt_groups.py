"""Rows of an update that share a prompt: found by their tokens, and cut to what a micro-batch
holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.models.prompt_sharing_gain import LeastSaving


class MicroBatch(NamedTuple):
    """The rows of a micro-batch.

    Attributes:
        rows: Their numbers, those of a tree one after the other.
        shared: bool `[rows]`, whether a row has the prompt of the row before it; None: no prompt is
            shared.
    """

    rows: list[int]
    shared: torch.Tensor | None


def group_rows(
    batch: Batch, together: int, budget: int, least: LeastSaving | None
) -> tuple[list[list[int]], npt.NDArray[np.bool_]]:
    """Group rows that are to share a prompt.

    Args:
        together: So many neighbouring rows are never separated.
        budget: Tokens that a group may have, its prompt counted once. One that has more is cut.
        least: See `find_least_saving`.

    Returns:
        The rows of each group, by its first row; `together` rows that share nothing are one too.
        And `[rows]`, which rows share the prompt of the one before them in their group.
    """
    is_shared = np.zeros(len(batch), dtype=np.bool_)
    units = [list(range(start, start + together)) for start in range(0, len(batch), together)]
    if least is None or ROUTED_EXPERTS in batch.columns:  # which differ between samples
        return units, is_shared
    prompts, responses = batch.ragged("prompt_ids"), batch.lengths("response_ids")
    tokens, bounds = prompts.values.numpy(), prompts.cu_seqlens.tolist()
    groups: dict[object, list[list[int]]] = {}
    for unit in units:
        keys = {tokens[bounds[row] : bounds[row + 1]].tobytes() for row in unit}
        key = keys.pop() if len(keys) == 1 else b""
        groups.setdefault(key or unit[0], []).append(unit)
    found: list[list[int]] = []
    for key, members in groups.items():
        rows = [row for unit in members for row in unit]
        prompt = bounds[rows[0] + 1] - bounds[rows[0]]
        whole = prompt * len(rows) + int(responses[rows].sum())
        if isinstance(key, int) or not least.is_reached(prompt * (len(rows) - 1), whole):
            found += members
            continue
        parts = _cut(members, prompt, responses, budget)
        found += parts
        for part in parts:
            is_shared[part[1:]] = True
    return sorted(found), is_shared


def _cut(
    units: Sequence[list[int]], prompt: int, responses: npt.NDArray[np.int64], budget: int
) -> list[list[int]]:
    """Cut a group into parts within the budget."""
    found: list[list[int]] = []
    used = budget
    for unit in units:
        tokens = int(responses[unit].sum())
        if not found or used + tokens > budget:
            found.append([])
            used = prompt
        found[-1] += unit
        used += tokens
    return found

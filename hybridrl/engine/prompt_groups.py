"""Rows of an update that share a prompt: found by their tokens, and cut to what a micro-batch
holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.batch.batch import ROUTED_EXPERTS, Batch
from hybridrl.errors import ConfigError
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.prompt_trees import explain_unshareable


class LeastSaving(NamedTuple):
    """A least saving with which a prompt is shared. Attention of trees takes more operations, which
    a few tokens are not worth.

    Attributes:
        share: Of the tokens of the prompt's samples.
        tokens: How many of them at least.
    """

    share: float
    tokens: int


LEAST_SAVINGS = {"auto": LeastSaving(0.1, 64), "true": LeastSaving(0.0, 1)}
"""By the setting `actor.share_prefixes`. With 64 tokens the smallest models gain, too."""


class MicroBatch(NamedTuple):
    """The rows of a micro-batch.

    Attributes:
        rows: Their numbers, those of a tree one after the other.
        shared: bool `[rows]`, whether a row has the prompt of the row before it; None: no prompt is
            shared.
    """

    rows: list[int]
    shared: torch.Tensor | None


def find_least_saving(setting: str, model: PackedModel) -> LeastSaving | None:
    """Return what sharing has to spare in a model; None: its samples share no prompts.

    Raises:
        ConfigError: if they are to, and cannot.
    """
    why = explain_unshareable(model)
    if setting == "true" and why:
        raise ConfigError(
            f"actor.share_prefixes=true: samples of {type(model.inner).__name__} cannot share a "
            f"prompt, because {why}. Set actor.share_prefixes=auto."
        )
    return None if why else LEAST_SAVINGS.get(setting)


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
        spared = prompt * (len(rows) - 1)
        whole = prompt * len(rows) + int(responses[rows].sum())
        if isinstance(key, int) or spared < max(least.tokens, least.share * whole):
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

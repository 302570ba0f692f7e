"""Compare the weights of two checkpoints, a window of each tensor at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors.rank_manifest import list_stems, load_manifests
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.layout.boxes import box_shape, full_box, split_box
from hybridrl.system.locations import Location

WINDOW_ELEMENTS = 4 << 20
"""What is compared at once."""


def compare_weights(before: Location, after: Location) -> dict[str, dict[str, Any]]:
    """Return, by weight of a role, the largest change of a value, the norm of the changes to that
    of the values before, and the share of values that are others."""
    old, new = _weights(before), _weights(after)
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            found[name] = {"other": f"only in the {'later' if name in new else 'earlier'} one"}
        elif old[name].shapes[name] != new[name].shapes[name]:
            found[name] = {"other": f"{old[name].shapes[name]} -> {new[name].shapes[name]}"}
        else:
            found[name] = _change(name, old[name], new[name])
    return found


def _weights(folder: Location) -> dict[str, TensorReader]:
    """Return, by the name of a weight, the files that have it."""
    lists = load_manifests(folder)
    stems = sorted(list_stems(lists) - {"moments"})
    opened = [TensorReader(folder, stem, lists) for stem in stems]
    return {name: files for files in opened for name in files.shapes}


def _change(name: str, old: TensorReader, new: TensorReader) -> dict[str, float]:
    largest = moved = size = changed = 0.0
    total = 0
    for box in split_box(full_box(old.shapes[name]), WINDOW_ELEMENTS):
        values: list[Tensor] = []
        for files in (old, new):
            values.append(torch.empty(box_shape(box)))
            files.read(name, box, values[-1])
        change = (values[1] - values[0]).double()
        largest = max(largest, float(change.abs().max()))
        moved += float(change.square().sum())
        size += float(values[0].double().square().sum())
        changed += float((change != 0).sum())
        total += change.numel()
    relative = (moved / size) ** 0.5 if size else float(moved > 0)
    return {"largest": largest, "relative": relative, "changed": changed / max(1, total)}

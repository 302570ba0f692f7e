"""A probe that runs a model's weight loaders and finds which elements of a checkpoint go where.

vLLM fuses (qkv, gate and up), slices, repeats and pads parameters, each in the loader of its layer.
Instead of a table for every architecture, the parameters are replaced for a moment by tensors
without memory (torch's meta device), and `model.load_weights` is given a checkpoint of such
tensors. Every copy that a loader makes is then seen as a strided view of a checkpoint tensor that
goes into a strided view of a parameter: offset and strides are the numbers of the elements. That is
exact, costs milliseconds at any size, and touches no weights. A loader that does more with elements
than to copy them, and parameters that are not filled by boxes, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.layout.boxes import Box, Piece, box_numel, intersect_boxes
from hybridrl.layout.tensor_views import find_view_box, storage_id
from hybridrl.rollout.weight_writer import target_box

_aten = torch.ops.aten


class LoaderProbeError(Exception):
    """A model has weights that cannot be written box by box; the message says which."""


def record_raw_parameters(model: nn.Module) -> None:
    """Record shape, dtype and loader of every parameter in `model.raw_parameters`, while raw."""
    model.raw_parameters = {
        name: make_zeros_like(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def make_zeros_like(parameter: Tensor, device: str | torch.device = "meta") -> Tensor:
    """Return zeros with the shape, dtype, class and attributes of `parameter`."""
    twin = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
    twin.__class__ = parameter.__class__
    twin.__dict__.update(parameter.__dict__)
    return twin


@torch.no_grad()
def probe_loader(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Piece, ...]]:
    """Find where the elements of a checkpoint lie in `model`, which is left as it was.

    Args:
        model: Has `load_weights`, and went through `record_raw_parameters`.
        shapes: Of every tensor of the checkpoint.

    Returns:
        The pieces that this rank holds of each tensor, none of some. `Piece.tensor` is the name of
        the parameter; of tied parameters the first name. Elements of parameters in no piece are
        padding, which vLLM keeps at zero.

    Raises:
        LoaderProbeError: a loader did not only copy boxes, or failed, or elements of a parameter
            come from nowhere.
    """
    with _replaced_parameters(model) as twins:
        dtype = next(iter(twins.values())).dtype
        checkpoint = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
        }
        watch = _CopyRecorder(checkpoint, twins)
        try:
            with watch:
                model.load_weights(iter(checkpoint.items()))
        except LoaderProbeError:
            raise
        except Exception as error:  # of the loaders, which are vLLM's or a user's
            raise LoaderProbeError(f"a loader failed: {type(error).__name__}: {error}") from error
    for name, twin in twins.items():
        _check_filled(name, tuple(twin.shape), watch.filled(name))
    return {name: tuple(pieces) for name, pieces in watch.pieces.items()}


class _CopyRecorder(TorchDispatchMode):
    """A dispatch mode that records the copies from checkpoint to parameters."""

    def __init__(self, checkpoint: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.pieces: dict[str, list[Piece]] = {name: [] for name in checkpoint}
        self._zeros: dict[str, list[Box]] = {name: [] for name in parameters}
        self._checkpoint = {storage_id(t): (name, t) for name, t in checkpoint.items()}
        self._parameters = {storage_id(t): (name, t) for name, t in parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and storage_id(args[0]) in self._parameters:
            self._copy(args[0], args[1])
        elif self._fills_with_zero(func, args):
            if args[0].numel():
                name, box = self._box(self._parameters, args[0])
                self._zeros[name].append(box)
        elif func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                self._refuse_known(func, leaf)
        return func(*args, **kwargs)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if not target.numel():
            return
        name, box = self._box(self._parameters, target)
        if storage_id(source) not in self._checkpoint:
            raise LoaderProbeError(f"{name} is not copied from the checkpoint but computed")
        if source.shape != target.shape:
            raise LoaderProbeError(f"{name} repeats elements of the checkpoint")
        origin, cut = self._box(self._checkpoint, source)
        pieces = self.pieces[origin]
        pieces.append(Piece(cut, name, tuple(start for start, _ in box)))
        while len(pieces) > 1 and (one := _joined(*pieces[-2:])) is not None:
            pieces[-2:] = [one]

    def filled(self, name: str) -> list[Box]:
        """Return the boxes of a parameter that were given values."""
        pieces = (piece for held in self.pieces.values() for piece in held if piece.tensor == name)
        return [*self._zeros[name], *map(target_box, pieces)]

    def _fills_with_zero(self, func: Any, args: tuple[Any, ...]) -> bool:
        fills = func is _aten.zero_.default or (func is _aten.fill_.Scalar and args[1:] == (0,))
        return fills and storage_id(args[0]) in self._parameters

    def _box(self, known: Mapping[int, tuple[str, Tensor]], view: Tensor) -> tuple[str, Box]:
        name, whole = known[storage_id(view)]
        box = find_view_box(view, whole)
        if box is None:
            raise LoaderProbeError(
                f"the loader reads or writes {name} {list(whole.shape)} as {list(view.shape)} with "
                f"strides {view.stride()}, which is not a box of it"
            )
        return name, box

    def _refuse_known(self, func: Any, leaf: Any) -> None:
        if not isinstance(leaf, Tensor):
            return
        for known in (self._parameters, self._checkpoint):
            if storage_id(leaf) in known:
                name, _ = known[storage_id(leaf)]
                raise LoaderProbeError(f"the loader of {name} uses {func}, not a plain copy")


def _joined(first: Piece, second: Piece) -> Piece | None:
    """Join two pieces if the second continues the first in both tensors; return None otherwise.
    Loaders of experts copy one after the other."""
    moved = [
        dim
        for dim, (one, other) in enumerate(zip(first.box, second.box, strict=True))
        if one != other
    ]
    if first.tensor != second.tensor or len(moved) != 1:
        return None
    (dim,) = moved
    (low, middle), (start, high) = first.box[dim], second.box[dim]
    goes_on = list(first.start)
    goes_on[dim] += middle - low
    if start != middle or tuple(goes_on) != second.start:
        return None
    return first._replace(box=(*first.box[:dim], (low, high), *first.box[dim + 1 :]))


def _check_filled(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuse a parameter of which `boxes` do not cover every element once."""
    for one, other in combinations(boxes, 2):
        if intersect_boxes(one, other) is not None:
            raise LoaderProbeError(f"elements of {name} are written twice")
    missing = torch.Size(shape).numel() - sum(map(box_numel, boxes))
    if missing:
        raise LoaderProbeError(f"{missing} elements of {name} {list(shape)} are not in the weights")


@contextmanager
def _replaced_parameters(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace parameters by raw ones without memory inside the block; yield these by name."""
    raw: Mapping[str, Tensor] = model.raw_parameters
    live = dict(model.named_parameters(remove_duplicate=False))
    if live.keys() != raw.keys():
        changed = sorted(live.keys() ^ raw.keys())
        raise LoaderProbeError(f"parameters came or went after loading: {', '.join(changed)}")
    names: dict[int, str] = {}  # of each parameter, the first
    try:
        for name, parameter in live.items():
            first = names.setdefault(id(parameter), name)
            _set(model, name, raw[first])
        yield {name: raw[name] for name in names.values()}
    finally:
        for name, parameter in live.items():
            _set(model, name, parameter)


def _set(model: nn.Module, name: str, parameter: Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)

"""Read-only tensors, the form in which the columns of a batch are read.

A column's memory is shared: with other readers of the same table, and with the object store. Torch
knows no read-only tensors, so a subclass refuses what would write into one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.errors import DataError

_OPERATORS = (
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_WRITE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_WRITE_NOTHING = {"requires_grad_", "share_memory_"}


class ReadOnlyTensor(Tensor):
    """A tensor whose memory must not be written.

    In-place operations on it raise. What shares its memory (views, parts, `detach()`, a `.to()`
    that moves nothing) is read-only too; what has memory of its own is a plain tensor. Pickled or
    saved it is a plain tensor. `as_subclass(torch.Tensor)` gives the plain tensor on the same
    memory, for code that is known not to write. (What goes round torch can still write: the
    storage itself, and `torch.from_numpy`, which does not look whether an array may be written.)
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if _writes(name, args, kwargs):
            raise DataError(
                f"`{name}` would change a column of a batch in place, which others read too. Make "
                "a new tensor (`x = x - y` in place of `x -= y`), or change a copy: `x.clone()`."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return result
            return _protect_shared(result, (*args, *kwargs.values()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.clone().__dlpack__(*args, **kwargs)  # what takes it may write

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __copy__(self) -> Tensor:
        return self


def make_read_only(tensor: Tensor) -> Tensor:
    """Return a read-only tensor on the same memory."""
    return tensor.as_subclass(ReadOnlyTensor)


def _writes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call would write into a read-only tensor."""
    if kwargs:
        if (out := kwargs.get("out")) is not None and _is_read_only(out):
            return True
        if kwargs.get("inplace") and args and _is_read_only(args[0]):
            return True
    ends = name.endswith("_") and not name.endswith("__") and name not in _WRITE_NOTHING
    if not ends and name not in _WRITE:
        return False
    return _is_read_only(args[0] if args else kwargs.get("input"))


def _is_read_only(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(isinstance(each, ReadOnlyTensor) for each in value)
    return isinstance(value, ReadOnlyTensor)


def _protect_shared(result: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result, read-only where it shares memory with a read-only argument."""
    if isinstance(result, Tensor):
        if type(result) is Tensor and _shares(result, arguments):
            return result.as_subclass(ReadOnlyTensor)
    elif isinstance(result, np.ndarray):
        result.flags.writeable = False
    elif isinstance(result, tuple | list) and result and isinstance(result[0], Tensor):
        kept = [_protect_shared(each, arguments) for each in result]
        if isinstance(result, list):
            return kept
        is_named = type(result) is not tuple  # what `max(dim)` and others return
        return type(result)(kept) if is_named else tuple(kept)
    return result


def _shares(result: Tensor, arguments: tuple[Any, ...]) -> bool:
    memory = _memory(result)
    for value in arguments:
        several = value if isinstance(value, tuple | list) else (value,)
        for each in several:
            if isinstance(each, ReadOnlyTensor) and _memory(each) == memory:
                return True
    return False


def _memory(tensor: Tensor) -> int | None:
    """Return the address of the storage; None if it is empty or has no address."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None

"""Which elements of a tensor a view of it shows, told by its place and strides alone.

Code that only slices, splits and copies tensors can so be asked what it does with their elements,
without any memory: it is run with tensors on torch's meta device.
"""

from __future__ import annotations

from torch import Tensor

from hybridrl.layout.boxes import Box


def view_box(view: Tensor, whole: Tensor) -> Box | None:
    """The box of the contiguous tensor `whole` that `view` shows, or None if it shows another
    choice or order of elements. A view may lack first dims, of which it shows one index."""
    lacking = whole.ndim - view.ndim
    if lacking < 0 or view.dtype != whole.dtype:
        return None
    offset = int(view.storage_offset())
    box = []
    for shown, length, stride, step in zip(
        (*[1] * lacking, *view.shape),
        whole.shape,
        (*whole.stride()[:lacking], *view.stride()),
        whole.stride(),
        strict=True,
    ):
        start, offset = divmod(offset, step)
        if start + shown > length or (shown > 1 and stride != step):
            return None
        box.append((start, start + shown))
    return tuple(box)


def storage(tensor: Tensor) -> int:
    """Of tensors that are alive, the same number means the same memory, real or not."""
    return int(tensor.untyped_storage()._cdata)

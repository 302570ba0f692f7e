"""The elements of a tensor that a view of it shows, derived from its offset and strides alone.

Code that only slices, splits and copies tensors can so be asked what it does with their elements,
without any memory: it is run with tensors on torch's meta device.
"""

from __future__ import annotations

from torch import Tensor

from hybridrl.layout.boxes import Box


def find_view_box(view: Tensor, whole: Tensor) -> Box | None:
    """Return the box of the contiguous tensor `whole` that `view` shows; None if it shows another
    selection or order of elements. A view may lack leading dims, of which it shows one index."""
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


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of the tensor's storage, real or on the meta device; unique among
    tensors that are alive."""
    return int(tensor.untyped_storage()._cdata)

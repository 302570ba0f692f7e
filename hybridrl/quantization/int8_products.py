"""Products of activations and weights in 8 bits, by the kernels of this device.

Weights have a scale for each row, activations one for each token, found when they
come: max |x| / 127. The integers' products are summed in 32 bits and scaled once. Source: Dettmers
et al. 2022, "LLM.int8()", arXiv:2208.07339, section 2.2, without its outliers.

On x86 CPUs oneDNN multiplies, which wants weights in an order of its own; elsewhere
`torch._int_mm`, which on GPUs wants sizes that are multiples of 8 and more than 16 rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.quantization.rounded_matrix import Rows, quantize_rows_int8
from hybridrl.system.device_traits import has_any_size_int_mm, has_onednn_int8, values_per_chunk

MULTIPLE, LEAST_ROWS = 8, 17
"""Of `torch._int_mm` on GPUs."""
PARTS = 2
"""Times `values_per_chunk` of sums at a time: each part puts the right matrix in order again."""


class Int8Weight:
    """A matrix ``[outputs, inputs]`` in int8 that activations are multiplied with.

    Args:
        rows: The matrix in int8.
    """

    def __init__(self, rows: Rows) -> None:
        self.outputs, self.inputs = rows.values.shape
        self.device = rows.values.device
        self._packs = has_onednn_int8(self.device.type)
        self._scales = rows.scales.flatten().contiguous()
        self._values: Tensor
        if self._packs:
            self._values = torch.ops.onednn.qlinear_prepack(rows.values.contiguous(), None)
            self._zeros = torch.zeros(self.outputs, dtype=torch.int64)
        else:
            self._values = rows.values

    @torch.no_grad()
    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` for ``x`` ``[..., inputs]``, in its dtype, ``[..., outputs]``."""
        rows = quantize_rows_int8(x.flatten(0, -2))
        products: Tensor = self._product(rows, x.dtype).unflatten(0, x.shape[:-1])
        return products

    def whole(self) -> Tensor:
        """Return the rounded weights in float32, ``[outputs, inputs]``."""
        if not self._packs:
            return self._values.float() * self._scales[:, None]
        # oneDNN's order is its own: each column is what comes of a one in its place.
        ones = torch.eye(self.inputs, dtype=torch.int8)
        return self._product(Rows(ones, torch.ones(self.inputs, 1)), torch.float32).T.contiguous()

    def _product(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        if not self._packs:
            return int8_matmul_once(rows, Rows(self._values.t(), self._scales[None]), dtype)
        products: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows.values, 1.0, 0, self._values, self._scales, self._zeros),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return products.mul_(rows.scales).to(dtype)


@torch.no_grad()
def int8_matmul_once(left: Rows, right: Rows, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right`` of matrices that are used once, in parts that fit the caches.

    Args:
        left: ``[m, k]`` with scales ``[m, 1]``.
        right: ``[k, n]`` with scales ``[1, n]``.

    Returns:
        ``[m, n]`` of this dtype.
    """
    (m, k), n = left.values.shape, right.values.shape[1]
    kind = left.values.device.type
    found = torch.empty(m, n, dtype=dtype, device=left.values.device)
    values, others, scales = left.values, right.values, right.scales
    if not has_any_size_int_mm(kind):
        values = F.pad(values, (0, -k % MULTIPLE)).contiguous()
        # cuBLAS has no kernel for a right matrix that lies row by row, of some sizes.
        others = F.pad(others.t(), (0, -k % MULTIPLE, 0, -n % MULTIPLE)).contiguous().t()
    is_whole = dtype is torch.float32
    some = max(LEAST_ROWS, PARTS * values_per_chunk(kind) // max(1, n))
    for into, part, its_scales in zip(
        found.split(some), values.split(some), left.scales.split(some), strict=True
    ):
        rows = len(part)
        if not has_any_size_int_mm(kind):
            part = F.pad(part, (0, 0, 0, max(0, LEAST_ROWS - rows)))
        sums = torch._int_mm(part, others)[:rows, :n]
        products = torch.mul(sums, its_scales, out=into if is_whole else None).mul_(scales)
        if not is_whole:
            into.copy_(products)
    return found

"""Products of activations and weights in 8 bits, by the kernels of this device.

Weights have a scale for each row (`rounded_rows`), activations one for each token, found when they
come: max |x| / 127. The integers' products are summed in 32 bits and scaled once. Source: Dettmers
et al. 2022, "LLM.int8()", arXiv:2208.07339, section 2.2, without its outliers.

On x86 CPUs oneDNN multiplies, which wants weights in an order of its own; elsewhere
`torch._int_mm`, which on GPUs wants sizes that are multiples of 8 and more than 16 rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.core.device import packs_int8
from hybridrl.models.rounded_rows import INT8, LARGEST, SMALLEST_SCALE, Rows, quantise

MULTIPLE, LEAST_ROWS = 8, 17
"""Of `torch._int_mm` on GPUs."""


class Int8Weight:
    """A matrix ``[outputs, inputs]`` that activations are multiplied with.

    Args:
        rows: The matrix in int8.
    """

    def __init__(self, rows: Rows) -> None:
        self.outputs, self.inputs = rows.values.shape
        self.device = rows.values.device
        self._packs = packs_int8(self.device.type)
        self._scales = rows.scales.flatten().contiguous()
        if self._packs:
            self._values = torch.ops.onednn.qlinear_prepack(rows.values.contiguous(), None)
            self._zeros = torch.zeros(self.outputs, dtype=torch.int64)
        else:
            beyond = (-self.inputs % MULTIPLE, -self.outputs % MULTIPLE)
            self._values = F.pad(rows.values, (0, beyond[0], 0, beyond[1]))

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """Rounds a matrix of any precision to nearest."""
        return cls(quantise(weight, INT8))

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ weight.T`` for ``x`` ``[..., inputs]``, in its precision ``[..., outputs]``."""
        flat = x.flatten(0, -2)
        scales = token_scales(flat)
        products = self._products((flat.float() * scales.reciprocal()).round_().to(torch.int8))
        return products.mul_(scales).to(x.dtype).unflatten(0, x.shape[:-1])

    def whole(self) -> Tensor:
        """What the rounded weights mean, float32 ``[outputs, inputs]``."""
        if not self._packs:
            return self._values[: self.outputs, : self.inputs].float() * self._scales[:, None]
        # oneDNN's order is its own: each column is what comes of a one in its place.
        return self._products(torch.eye(self.inputs, dtype=torch.int8)).T.contiguous()

    def _products(self, values: Tensor) -> Tensor:
        """Integers ``[tokens, inputs]`` times the weights, float32."""
        if self._packs:
            found: Tensor = torch.ops.onednn.qlinear_pointwise(
                *(values, 1.0, 0, self._values, self._scales, self._zeros),
                *(None, 1.0, 0, torch.float32, "none", [], ""),
            )
            return found
        rows = len(values)
        beyond = self._values.shape[1] - self.inputs
        padded = F.pad(values, (0, beyond, 0, max(0, LEAST_ROWS - rows)))
        sums = torch._int_mm(padded, self._values.t())
        return sums[:rows, : self.outputs].float() * self._scales


def token_scales(x: Tensor) -> Tensor:
    """``[tokens, 1]``, float32. A token with a number that is not finite has such a scale, so that
    what comes of it is seen."""
    largest = x.abs().amax(1, keepdim=True).float()
    return (largest / LARGEST[INT8]).clamp_min(SMALLEST_SCALE)

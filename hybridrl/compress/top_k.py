"""The largest values of a tensor alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybridrl.compress.buffers import as_float32, check_encoded, flat_values, memory_for
from hybridrl.errors import CodecError, ConfigError

MOST_VALUES = 2**31 - 1


@dataclass(frozen=True)
class TopK:
    """A share of the values, those of the largest magnitude, exact; the others decode to zero.
    Source: Lin et al., Deep gradient compression, arXiv 1712.01887.

    What is left out has to come later: see `ErrorFeedback`. The bytes are the positions (int32, in
    rising order), then the values (float32). Infinities are the largest values and a NaN is larger
    still, so both are seen.

    Args:
        share: Of all values, above 0 and at most 1; at least one value is kept.

    Raises:
        ConfigError: if `share` is something else.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"A codec cannot keep a share of {self.share} of the values: `share` must be above "
                "0 and at most 1, such as 0.01."
            )

    def kept(self, numel: int) -> int:
        """How many of so many values are kept."""
        return math.ceil(self.share * numel)

    def size(self, numel: int) -> int:
        """The exact number of bytes of so many values.

        Raises:
            CodecError: if there are more than int32 can number.
        """
        if numel > MOST_VALUES:
            raise CodecError(
                f"{self} numbers values with 31 bits and was given {numel} at once: encode parts "
                f"of at most {MOST_VALUES}."
            )
        return 8 * self.kept(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Codec.encode`."""
        flat, out = flat_values(values), memory_for(self, values, out)
        largest = flat.abs().topk(self.kept(len(flat)), sorted=False).indices
        positions = largest.sort().values
        half = len(out) // 2
        out[:half] = positions.int().view(torch.uint8)
        out[half:] = flat[positions].float().view(torch.uint8)
        return out

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Codec.decode`."""
        check_encoded(self, encoded, numel, dtype)
        positions, values = as_float32(encoded).view(2, -1)
        flat = torch.zeros(numel, dtype=dtype, device=encoded.device)
        flat[positions.view(torch.int32).long()] = values.to(dtype)
        return flat

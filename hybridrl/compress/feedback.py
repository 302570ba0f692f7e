"""Giving back later what a codec lost: error feedback."""

from __future__ import annotations

import torch

from hybridrl.compress.buffers import flat_values
from hybridrl.compress.codec import Codec
from hybridrl.errors import CodecError


class ErrorFeedback:
    """Adds what encoding lost last time to what is encoded now, so that over many steps the sum of
    what arrives keeps to the sum of what was given. Source: Karimireddy et al., Error feedback
    fixes SignSGD, arXiv 1901.09847.

    One of these belongs to one tensor on one sender; the receiver decodes with the codec alone.
    After a tensor with an infinity or a NaN it begins anew: what was lost then is no number.

    Args:
        codec: Any codec.

    Attributes:
        lost: Float32, flat: what has not been sent yet; None before the first tensor. It takes four
            bytes for each value, and belongs in a checkpoint with the optimizer's state.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.lost: torch.Tensor | None = None

    def encode(self, values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of these values and of what was lost before (see `Codec.encode`).

        Raises:
            CodecError: if the tensor before had another number of values.
        """
        wanted = flat_values(values).float()
        if self.lost is not None:
            if len(self.lost) != len(wanted):
                raise CodecError(
                    f"Error feedback of a tensor of {len(self.lost)} values was given one of "
                    f"{len(wanted)}: each tensor needs its own."
                )
            wanted = wanted + self.lost
        encoded = self.codec.encode(wanted, out)
        lost = wanted - self.codec.decode(encoded, len(wanted), torch.float32)
        self.lost = torch.where(lost.isfinite(), lost, 0)
        return encoded

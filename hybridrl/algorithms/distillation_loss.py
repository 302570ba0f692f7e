"""The loss of distillation: how far a student is from its teacher, on the student's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hybridrl.algorithms.segments import Segments, on_mask, require_known
from hybridrl.algorithms.token_loss import TokenLoss

DISTANCES = ("reverse", "forward")


@dataclass(frozen=True)
class Distillation:
    """KL(student, teacher), or KL(teacher, student), in the place of each token. Agarwal et al.
    2024, arXiv:2306.13649, equation 6 with lambda = 1: samples are the student's, and no gradient
    goes through how they were drawn.

    Attributes:
        kind: `reverse` or `forward`; see `hybridrl.models.teacher_kl`.
        needs: Columns without which there is nothing to learn.
    """

    kind: str = "reverse"
    needs: ClassVar = ("teacher_ids", "teacher_log_probs")

    def __post_init__(self) -> None:
        require_known("distillation.loss", self.kind, DISTANCES)

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the model's forward, for the outputs that the loss reads."""
        return {"kind": self.kind}

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: Segments
    ) -> TokenLoss:
        """Loss per token, `[tokens]`, of the outputs `divergence` and `entropy`."""
        found = on_mask(outputs["divergence"], segments.mask)
        return TokenLoss(found, {"entropy": outputs["entropy"].detach()})

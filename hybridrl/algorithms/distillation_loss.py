"""The loss of distillation: the KL between student and teacher on the student's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hybridrl.algorithms.segments import TokenSegments, apply_mask, check_known_name
from hybridrl.algorithms.token_loss import TokenLoss

KL_DIRECTIONS = ("reverse", "forward")


@dataclass(frozen=True)
class DistillationObjective:
    """The objective KL(student, teacher), or KL(teacher, student), at each token. Agarwal et al.
    2024, arXiv:2306.13649, equation 6 with lambda = 1: samples are the student's, and no gradient
    goes through how they were drawn.

    Attributes:
        kind: `reverse` or `forward`; see `hybridrl.models.teacher_kl`.
        needs: Columns without which there is nothing to learn.
    """

    kind: str = "reverse"
    needs: ClassVar = ("teacher_ids", "teacher_log_probs")

    def __post_init__(self) -> None:
        check_known_name("distillation.loss", self.kind, KL_DIRECTIONS)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the model's forward that make the outputs which the loss reads."""
        return {"kind": self.kind}

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`, from the outputs `divergence` and `entropy`."""
        found = apply_mask(outputs["divergence"], segments.mask)
        return TokenLoss(found, {"entropy": outputs["entropy"].detach()})

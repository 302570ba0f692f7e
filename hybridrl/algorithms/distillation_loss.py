"""The loss of distillation: the KL between student and teacher on the student's samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
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


def sum_over_chunks(values: Tensor, chunks: Tensor, row_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the sum over its chunk, 0 without one, and the chunk's length.

    Args:
        values: `[tokens]`.
        chunks: `[tokens]`, counted from 0 in each row; -1: none.
        row_starts: `[tokens]`, the place of the first token of each token's row.
    """
    inside = chunks >= 0
    places = row_starts + chunks.clamp_min(0)
    sums, counts = (
        torch.zeros_like(values).index_add(0, places, torch.where(inside, x, 0.0))[places]
        for x in (values, torch.ones_like(values))
    )
    return torch.where(inside, sums, 0.0), counts.clamp_min(1)

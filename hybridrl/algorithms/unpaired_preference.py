"""The loss of single responses that are marked as good or bad, without another to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridrl.algorithms.segments import TokenSegments
from hybridrl.algorithms.token_loss import TokenLoss


@dataclass(frozen=True)
class UnpairedPreferenceObjective:
    """The objective of KTO: 1 - sigmoid(reward - beta z) of a good response, and of a bad one
    1 - sigmoid(beta z - reward) (Ethayarajh 2024, arXiv:2402.01306, section 4.1).

    The reward is beta times the log-ratio to the reference, summed over a response's tokens; z is
    an estimate of the KL to the reference, from which both are seen as gain or loss.

    Attributes:
        beta: Scale of the rewards.
        desirable_weight, undesirable_weight: Of good and of bad responses.
        needs: Columns without which there is nothing to learn.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    needs: ClassVar = ("ref_log_probs", "label", "kl")

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`, of `log_probs` and the columns `ref_log_probs`,
        `label` (1 good, 0 bad) and `kl` (z, the same everywhere)."""
        gap = segments.sum(outputs["log_probs"] - columns["ref_log_probs"])
        is_good = segments.mean(columns["label"]) > 0.5
        z = segments.mean(columns["kl"])
        ahead = torch.where(is_good, gap - z, z - gap)
        weights = torch.full_like(gap, self.undesirable_weight)
        weights = weights.masked_fill(is_good, self.desirable_weight)
        loss = weights * (1.0 - torch.sigmoid(self.beta * ahead))
        ahead = ahead.detach()
        metrics = {
            "label_accuracy_by_row": (ahead > 0).to(ahead.dtype),
            "label_reward_by_row": self.beta * gap.detach(),
            "label_kl_by_row": z,
        }
        return TokenLoss(segments.spread(loss), metrics)

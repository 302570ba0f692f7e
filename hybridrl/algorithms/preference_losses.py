"""Losses of pairs of responses to one prompt, of which the first is preferred.

Rows come in pairs, the chosen one first. The loss of a pair lies on every token of both its
answers, so with weights of mode `seq-mean-token-mean` the loss of a mini-batch is the mean over its
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from hybridrl.algorithms.segments import TokenSegments, check_known_name
from hybridrl.algorithms.token_loss import TokenLoss

PREFERENCE_LOSSES = ("sigmoid", "ipo")


@dataclass(frozen=True)
class PreferenceObjective:
    """The DPO or IPO objective, whose scores of two responses are log-ratios to the reference.

    With h = chosen - rejected log-ratio: `sigmoid` is -log sigmoid(beta h) (Rafailov 2023,
    arXiv:2305.18290); `ipo` is (h - 1 / (2 beta))^2 (Azar 2023, arXiv:2310.12036). Both only ask
    the chosen answer to be ahead, and let it become less likely if the rejected one does so faster;
    its likelihood can be asked for besides (Pang 2024, arXiv:2404.19733).

    Attributes:
        beta: How hard the policy is held to the reference.
        loss: `sigmoid` or `ipo`.
        length_normalised: A log-ratio is the mean over an answer's tokens, not the sum.
        nll_coefficient: Weight of the chosen answer's negative log-likelihood, mean over its
            tokens.
        needs: Columns without which there is nothing to learn.
    """

    beta: float = 0.1
    loss: str = "sigmoid"
    length_normalised: bool = False
    nll_coefficient: float = 0.0
    needs: ClassVar = ("ref_log_probs",)

    def __post_init__(self) -> None:
        check_known_name("preference.loss", self.loss, PREFERENCE_LOSSES)

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`, of `log_probs` and the column `ref_log_probs`."""
        differences = outputs["log_probs"] - columns["ref_log_probs"]
        reduce = segments.mean if self.length_normalised else segments.sum
        chosen, rejected = reduce(differences).view(-1, 2).unbind(1)
        h = chosen - rejected
        if self.loss == "ipo":
            loss = (h - 1 / (2 * self.beta)).square()
        else:
            loss = -F.logsigmoid(self.beta * h)
        if self.nll_coefficient:
            likelihood = segments.mean(outputs["log_probs"]).view(-1, 2)[:, 0]
            loss = loss - self.nll_coefficient * likelihood
        return _on_both(loss, h * self.beta, segments)


@dataclass(frozen=True)
class BradleyTerryObjective:
    """The objective of a reward model, -log sigmoid(chosen - rejected - margin) + centre (chosen +
    rejected)^2 (Ouyang 2022, arXiv:2203.02155; Eisenstein 2023, arXiv:2312.09244).

    Attributes:
        centre: Keeps the scores around 0, which the first term leaves open.
    """

    centre: float = 0.0

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`, of the output `values`, of which the last of a row
        is its score, and the column `margin`, if there is one."""
        chosen, rejected = segments.last(outputs["values"]).view(-1, 2).unbind(1)
        margin = segments.mean(columns["margin"]).view(-1, 2)[:, 0] if "margin" in columns else 0.0
        loss = -F.logsigmoid(chosen - rejected - margin)
        if self.centre:
            loss = loss + self.centre * (chosen + rejected).square()
        return _on_both(loss, chosen - rejected, segments)


def _on_both(loss: Tensor, margin: Tensor, segments: TokenSegments) -> TokenLoss:
    margin = margin.detach()
    metrics = {"pair_margin": margin, "pair_accuracy": (margin > 0).to(margin.dtype)}
    spread = {f"{name}_by_row": x.repeat_interleave(2) for name, x in metrics.items()}
    return TokenLoss(segments.spread(loss.repeat_interleave(2)), spread)

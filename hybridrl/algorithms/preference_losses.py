"""Losses of pairs of responses to one prompt, of which the first is preferred.

Rows come in pairs, the chosen one first. The loss of a pair lies on every token of both its
answers, so with weights of mode `seq-mean-token-mean` the loss of a mini-batch is the mean over its
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.algorithms.segments import TokenSegments, check_known_name
from hybridrl.algorithms.token_loss import TokenLoss

REFERENCE_FREE_LOSSES = ("simpo", "orpo", "cpo")
PREFERENCE_LOSSES = ("sigmoid", "ipo", *REFERENCE_FREE_LOSSES)
_MAXIMUM_ODDS = 1e12
"""The odds of a response whose tokens all have a probability of 1, so low that the squares of their
gradients fit into float32."""


@dataclass(frozen=True)
class PreferenceObjective:
    """The objective of DPO and of its relatives, each of which gives responses an implicit reward.

    With m = chosen - rejected reward, the losses are:

    * `sigmoid`: -log sigmoid(m); the reward is beta times the log-ratio to the reference (Rafailov
      2023, arXiv:2305.18290).
    * `ipo`: ((m - 1/2) / beta)^2, of the same reward (Azar 2023, arXiv:2310.12036).
    * `simpo`: -log sigmoid(m - margin); the reward is beta times the mean log-probability of the
      tokens (Meng 2024, arXiv:2405.14734).
    * `orpo`: NLL - beta log sigmoid(m); the reward is log(p / (1 - p)), p the geometric mean of the
      tokens' probabilities (Hong 2024, arXiv:2403.07691).
    * `cpo`: -log sigmoid(m); the reward is beta times the log-probability (Xu 2024,
      arXiv:2401.08417).

    NLL is the negative log-likelihood of the chosen response, mean over its tokens. All losses but
    `orpo` only ask the chosen response to be ahead, and let it become less likely if the rejected
    one does so faster; `nll_coefficient` adds the NLL to them (Pang 2024, arXiv:2404.19733).

    Attributes:
        beta: Scale of the rewards; with `orpo` the weight of the second term.
        loss: One of `PREFERENCE_LOSSES`.
        margin: By how much the chosen response has to be ahead with `simpo`.
        length_normalised: With `sigmoid`, `ipo` and `cpo`: mean over a response's tokens instead of
            sum.
        nll_coefficient: Weight of the NLL, which is 1 with `orpo`.
    """

    beta: float = 0.1
    loss: str = "sigmoid"
    length_normalised: bool = False
    nll_coefficient: float = 0.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        check_known_name("preference.loss", self.loss, PREFERENCE_LOSSES)

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns without which there is nothing to learn."""
        return () if self.loss in REFERENCE_FREE_LOSSES else ("ref_log_probs",)

    @property
    def reward_scale(self) -> float:
        """The factor that turns scores into rewards."""
        return 1.0 if self.loss == "orpo" else self.beta

    def compute_scores(self, totals: Tensor, tokens: Tensor) -> Tensor:
        """Compute the implicit reward of each response over `reward_scale`, `[rows]`.

        Args:
            totals: `[rows]`, the sum over its tokens of their log-probabilities, or of their
                log-ratios to the reference if the loss `needs` one.
            tokens: `[rows]`, the number of its tokens.
        """
        if self.length_normalised or self.loss in ("simpo", "orpo"):
            totals = totals / tokens.clamp(min=1)
        if self.loss == "orpo":
            # Near a probability of 1 the difference 1 - exp(x) would be 0.
            totals = totals.clamp(max=-1 / _MAXIMUM_ODDS)
            return totals - torch.log(-torch.expm1(totals))
        return totals

    def __call__(
        self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor], segments: TokenSegments
    ) -> TokenLoss:
        """Return the loss per token, `[tokens]`, of `log_probs` and, if the loss `needs` it, of the
        column `ref_log_probs`."""
        log_probs = scored = outputs["log_probs"]
        if self.needs:
            scored = log_probs - columns["ref_log_probs"]
        scores = self.compute_scores(segments.sum(scored), segments.lengths)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        h = chosen - rejected
        ahead = self.reward_scale * h
        if self.loss == "ipo":
            loss = (h - 1 / (2 * self.beta)).square()
        else:
            loss = -F.logsigmoid(ahead - self.margin if self.loss == "simpo" else ahead)
        weight = self.nll_coefficient
        if self.loss == "orpo":
            loss, weight = self.beta * loss, 1.0
        if weight:
            loss = loss - weight * segments.mean(log_probs).view(-1, 2)[:, 0]
        return _on_both(loss, ahead, segments)


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

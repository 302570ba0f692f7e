"""Safe RLHF: maximizes the reward under a limit on the cost; a learned Lagrange multiplier weights
the cost.

Dai et al. 2023, arXiv:2310.12773.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from hybridrl.algorithms import LagrangeMultiplier
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.controller import BatchRef
from hybridrl.trainers.policy_trainer import PolicyTrainer, join_columns
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import (
    ADVANTAGE_COLUMNS,
    TOKEN_COLUMNS,
    constrained_advantages,
)

_ADVANTAGE_INPUTS = (*TOKEN_COLUMNS, "costs", "values", "cost_values", "log_probs")


class Trainer(PolicyTrainer):
    """The trainer of Safe RLHF."""

    USES = trainer_settings("safe_rlhf")
    ROLES = ("actor", "critic", "cost_critic", "reward", "cost")
    CRITICS: ClassVar = {
        "critic": ("values", "returns"),
        "cost_critic": ("cost_values", "cost_returns"),
    }

    def prepare(self) -> None:
        super().prepare()
        cost = self.config.cost
        assert cost is not None  # the preset of this program sets it
        self.multiplier = LagrangeMultiplier(
            cost.multiplier, cost.limit, cost.multiplier_rate, cost.multiplier_max
        )
        self.last_costs: BatchRef | None = None

    def step(self) -> StepResult:
        config, longest = self.config.algorithm, self.config.rollout.max_tokens
        with_kl = ["ref_log_probs"] if "reference" in self.groups else []
        self._learn_multiplier()
        samples = self.samples()
        judged = self.judge(samples)
        rows, of_rows = self.unfold(samples, judged)
        batch = join_columns(rows, [*of_rows, *self.score(rows)])
        credit = partial(
            constrained_advantages,
            config=config,
            longest=longest,
            coefficient=self.kl.update(),
            multiplier=self.multiplier.value,
        )
        makes = [*ADVANTAGE_COLUMNS, "returns", "cost_returns"]
        shaped = [*_ADVANTAGE_INPUTS, *self.credited, *with_kl]
        batch |= batch.apply(credit, shaped, makes=makes, on=self.groups["actor"])
        self.last_costs = judged[-1]
        return StepResult(
            batch,
            self.learn(batch, "log_probs"),
            metrics={"cost/multiplier": self.multiplier.value},
            scored_samples=[join_columns(samples, judged)],
        )

    def _learn_multiplier(self) -> None:
        """Update the multiplier from the costs of the step before, one number per sample."""
        if self.last_costs is not None:
            self.multiplier.update(self.last_costs.collect(["costs"])["costs"])
        self.last_costs = None

    def state(self) -> dict[str, Any]:
        self._learn_multiplier()
        return {**super().state(), "multiplier": self.multiplier.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.multiplier.load_state(state["multiplier"])

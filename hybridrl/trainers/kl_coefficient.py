"""The weight of the KL from step to step: fixed, or steered towards `algorithm.kl_target`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hybridrl.algorithms import AdaptiveKL, FixedKL
from hybridrl.algorithms.kl import IN_REWARD
from hybridrl.config.schema import Config
from hybridrl.controller import Handle

TOKENS = ("tokens", "critic_tokens", "cost_critic_tokens")


class KLCoefficient:
    """Learns the KL of a step from its updates, when the next step begins. A fixed coefficient
    learns nothing and waits for nothing."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._adapts = algorithm.kl_target is not None
        if algorithm.kl_target is None:
            self._controller: FixedKL | AdaptiveKL = FixedKL(algorithm.kl_coefficient)
        else:
            self._controller = AdaptiveKL(
                algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon
            )
        self._samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
        self._watched: list[Handle] = []

    @property
    def coefficient(self) -> float:
        """The weight now."""
        return self._controller.coefficient

    def watch(self, update: Handle) -> Handle:
        """Notes an update of the actor; returns it."""
        if self._adapts:
            self._watched.append(update)
        return update

    def update(self) -> float:
        """Adapts to the updates noted since the last time; returns the weight for the new step."""
        found = [update.get() for update in self._watched]
        self._watched.clear()
        if any("kl" in update for update in found):
            self._controller.update(mean_of_updates("kl", found), self._samples)
        return self.coefficient

    def state(self) -> dict[str, float]:
        """What a later job needs to go on from here; waits for the updates noted so far."""
        self.update()
        return self._controller.state()

    def load_state(self, state: dict[str, float]) -> None:
        """Goes on from what `state` gave."""
        self._controller.load_state(state)


def notices_of_kl(config: Config) -> list[str]:
    """A sentence for the user whose KL in the reward does not hold the policy."""
    algorithm = config.algorithm
    estimator = algorithm.kl_estimator or IN_REWARD
    if not algorithm.kl_in_reward or estimator.removesuffix("+") == IN_REWARD:
        return []
    return [
        f"algorithm.kl_estimator={estimator} with algorithm.kl_in_reward=true: in the reward only "
        "k1 has the gradient of the KL; the others hold the policy by a fraction of it, in another "
        "direction. Leave algorithm.kl_estimator out for k1."
    ]


def mean_of_updates(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    """Return the mean of a metric over the updates that have it, weighted by their tokens."""
    found = [update for update in updates if name in update]
    weights = [_tokens(update) for update in found]
    if None in weights or not (total := math.fsum(weights)):
        weights, total = [1.0] * len(found), float(len(found))
    return math.fsum(w * update[name] for w, update in zip(weights, found, strict=True)) / total


def _tokens(update: Mapping[str, float]) -> float | None:
    """Return the tokens that an update, of whatever role, learned from; None if it does not say."""
    return next((x for name, x in update.items() if name in TOKENS), None)

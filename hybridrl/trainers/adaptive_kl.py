"""The weight of the KL from step to step: fixed, or steered towards `algorithm.kl_target`."""

from __future__ import annotations

from hybridrl.algorithms import AdaptiveKL, FixedKL
from hybridrl.config.schema import Config
from hybridrl.controller import Handle


class KLCoefficient:
    """Learns the KL of a step from its updates, when the next step begins."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        if algorithm.kl_target is None:
            self._controller = FixedKL(algorithm.kl_coefficient)
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
        self._watched.append(update)
        return update

    def update(self) -> float:
        """Adapts to the updates noted since the last time; returns the weight for the new step."""
        found = [update.get().get("kl") for update in self._watched]
        self._watched.clear()
        known = [value for value in found if value is not None]
        if known:
            self._controller.update(sum(known) / len(known), self._samples)
        return self.coefficient

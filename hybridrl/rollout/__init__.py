"""Generation of samples: one protocol for single turns, episodes and agents, over any engine."""

from hybridrl.rollout.rollout_engine import PartialRollout, RolloutEngine, SamplingSettings

__all__ = ["PartialRollout", "RolloutEngine", "SamplingSettings"]

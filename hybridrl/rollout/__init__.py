"""Generation of samples: one protocol for single turns, episodes and agents, over any engine."""

from hybridrl.rollout.rollout_engine import RolloutEngine, SamplingSettings

__all__ = ["RolloutEngine", "SamplingSettings"]

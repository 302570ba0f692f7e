"""Generation of samples: one protocol for single turns, episodes and agents, over any engine."""

from hybridrl.rollout.engine_requests import SamplingSettings
from hybridrl.rollout.rollout_engine import RolloutEngine

__all__ = ["RolloutEngine", "SamplingSettings"]

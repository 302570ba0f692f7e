"""Generation: one interface, vLLM or transformers behind it; episodes of several turns around
either."""

from hybridrl.rollout.engine_requests import Sampling
from hybridrl.rollout.rollout_engine import RolloutEngine

__all__ = ["RolloutEngine", "Sampling"]

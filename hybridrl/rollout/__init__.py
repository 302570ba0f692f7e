"""Generation: one interface, vLLM or transformers behind it; episodes of several turns around
either."""

from hybridrl.rollout.base import RolloutEngine, Sampling

__all__ = ["RolloutEngine", "Sampling"]

"""Generation: one interface, vLLM or transformers behind it."""

from hybridrl.rollout.base import RolloutEngine, Sampling

__all__ = ["RolloutEngine", "Sampling"]

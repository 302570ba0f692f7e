"""Generation: one interface, vLLM or transformers behind it; episodes of several turns around
either."""

from hybridrl.rollout.rollout_engine import RolloutEngine, Sampling

__all__ = ["RolloutEngine", "Sampling"]

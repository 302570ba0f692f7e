"""HybridRL."""

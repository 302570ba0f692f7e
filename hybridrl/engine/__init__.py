"""Training engines: forward, backward, optimizer, and the hybrid of training and generation."""

from hybridrl.engine.hybrid import HybridEngine
from hybridrl.engine.train import Loss, TrainEngine

__all__ = ["HybridEngine", "Loss", "TrainEngine"]

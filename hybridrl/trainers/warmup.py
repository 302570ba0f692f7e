"""Supervised steps before reinforcement: a model that is never right gives nothing to reinforce."""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.algorithms import token_weights
from hybridrl.config.schema import OptimizerConfig, WarmupConfig
from hybridrl.controller import Executor, WorkerGroup
from hybridrl.core.batch import Batch
from hybridrl.data.loader import PromptLoader

AHEAD = 4
"""Steps queued ahead of the one that is waited for, so that workers never wait for the driver."""


def warm_up(
    executor: Executor,
    actor: WorkerGroup,
    examples: Batch,
    config: WarmupConfig,
    seed: int,
    progress: Callable[[int, dict[str, float]], None],
) -> None:
    """Runs `config.steps` supervised steps on `examples`, then starts the actor's own optimizer.

    Args:
        progress: Called after each step with its number (from 1) and metrics.
    """
    optimizer = OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=10)
    actor.start_optimizer(optimizer, config.steps)
    loader = PromptLoader(examples, config.examples_per_step, seed)
    queue = []
    for step in range(config.steps + AHEAD):
        if step < config.steps:
            batch = next(loader)
            queue.append(actor.update_supervised(executor.put(batch | _weights(batch))))
        if step >= AHEAD and queue:
            progress(step - AHEAD + 1, queue.pop(0).get())
    actor.start_optimizer(None, 0)


def _weights(batch: Batch) -> Batch:
    dense, real = batch.padded("response_mask")
    weights = token_weights(dense.bool(), "token-mean")[real]
    return Batch.from_columns(
        {"loss_weights": batch.ragged("response_mask")._replace(values=weights)}
    )

"""The schema of meta-learning."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.constraints import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
)


@dataclass
class MetaConfig:
    """Reward models for many annotators, domains or users, each of which is a task with few
    preference pairs; see docs/algorithms.md."""

    features: PositiveInt = 8
    """Reward features: outputs of the model's head. A task's reward is their sum with weights of
    its own, which adapt to its pairs; all tasks start from weights that give the first feature."""
    support_pairs: PositiveInt = 5
    """Pairs of a task, drawn by `run.seed` and the step, that its weights adapt to; all but one of
    a task that has fewer. The others are its query pairs, whose loss at the adapted weights is
    what the model learns from."""
    task_pairs: PositiveInt = 20
    """Most pairs of a task in a step, support and query together; a task with more comes in several
    steps."""
    inner_steps: PositiveInt = 3
    """Steps of gradient descent that adapt the weights of a task."""
    inner_rate: PositiveFloat = 1.0
    """Learning rate of these steps."""
    second_order: bool = True
    """Whether the gradient passes through these steps; false: they count as constants (first-order
    MAML), which learns less from the support pairs."""
    new_share: Probability = 0.5
    """Share of a step's tasks that adapt from the shared start, as new tasks do, instead of from
    their own row in the table of tasks."""
    task_rate: NonNegativeFloat = 0.01
    """Learning rate (Adam) of the table of tasks; 0: all tasks always begin from the shared
    start."""

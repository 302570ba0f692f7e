"""The schema of learning from preferences, and of reward models for many tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hybridrl.config.constraints import (
    AppliesIf,
    NonNegativeFloat,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    programs,
)
from hybridrl.config.objective_schema import DPO

_KTO = AppliesIf(*programs("kto"))


@dataclass
class PreferenceConfig:
    """Learning from preferences: of pairs with trainers `dpo`, `online_dpo` and `reward_model`, and
    with `kto` of single responses."""

    loss: Annotated[str, OneOf("sigmoid", "ipo", "simpo", "orpo", "cpo"), DPO] = "sigmoid"
    """Of `dpo` and `online_dpo`: `sigmoid` or `ipo`, which compare the policy with a reference
    model; or `simpo`, `orpo` or `cpo`, which need none. See docs/algorithms.md."""
    beta: Annotated[PositiveFloat, AppliesIf(*programs("dpo", "online_dpo", "kto"))] = 0.1
    """Of `dpo`, `online_dpo` and `kto`: how hard the policy is held to the reference; with `simpo`
    (2 is usual) and `cpo` the scale of log-probabilities, with `orpo` the weight of the odds
    ratio."""
    margin: Annotated[NonNegativeFloat, DPO, AppliesIf(".loss=simpo")] = 1.0
    """How far the chosen response has to be ahead (gamma in the paper); half of `beta` is usual."""
    length_normalised: Annotated[
        bool, DPO, AppliesIf(".loss=sigmoid", ".loss=ipo", ".loss=cpo")
    ] = False
    """Of `dpo` and `online_dpo`: mean instead of sum over the tokens of a response."""
    nll_coefficient: Annotated[
        NonNegativeFloat, DPO, AppliesIf(".loss=sigmoid", ".loss=ipo", ".loss=simpo", ".loss=cpo")
    ] = 0.0
    """Of `dpo` and `online_dpo`: weight of the chosen response's negative log-likelihood, which
    keeps it from becoming less likely together with the rejected one; 1 is usual. With `orpo` it
    is always 1."""
    centre: Annotated[NonNegativeFloat, AppliesIf(*programs("reward_model"))] = 0.0
    """Of `reward_model`: weight of the square of a pair's scores, which keeps them around 0."""
    desirable_weight: Annotated[NonNegativeFloat, _KTO] = 1.0
    """Of `kto`: weight of good responses. Where they are fewer than bad ones, so many times as much
    that the sums of both weights are alike."""
    undesirable_weight: Annotated[NonNegativeFloat, _KTO] = 1.0
    """Of `kto`: weight of bad responses."""


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

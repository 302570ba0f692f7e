"""Trainer: what every driver program has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.rollout import Sampling
from hybridrl.trainers.evaluation import evaluate_answers

SAMPLE = ("prompt_ids", "response_ids")
"""What a model needs to score a sample."""
LEARNED_FROM = (*SAMPLE, "response_mask", "loss_weights")
"""What every update needs of it besides."""
SAMPLED = ("rollout_log_probs", "policy_version")
"""What an update needs to know of the policy that made it."""


class Trainer(ABC):
    """A driver program: `step` is the dataflow of its algorithm, and nothing below knows it.

    Args:
        groups: The worker groups that `roles` asks for.
        sampling: How samples are drawn while training.
        next_batch: Gives the prompts (examples, pairs) of the next step.
        next_examples: Gives prompts with their right responses, for a supervised update with this
            weight.

    Attributes:
        DATA: What a step learns from: `prompts`, `examples` with their responses, or `pairs` of a
            better and a worse response, as neighbouring rows.
        SAVED: Roles whose models are kept, and the names of their folders in the run directory.
        GENERATES: False for a program whose actor never samples; it gets no rollout engine.
        TRAINS: False for a program that only evaluates.
        figures: The program's own numbers of the last step, written with its metrics.
        notices: Sentences for the user, shown after the step.
    """

    DATA: ClassVar[Literal["prompts", "examples", "pairs"]] = "prompts"
    SAVED: ClassVar[Mapping[str, str]] = {"actor": "model"}
    GENERATES: ClassVar[bool] = True
    TRAINS: ClassVar[bool] = True

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, WorkerGroup],
        sampling: Sampling,
        next_batch: Callable[[], BatchRef],
        next_examples: Callable[[float], BatchRef],
    ) -> None:
        self.config = config
        self.groups = groups
        self.sampling = sampling
        self.next_batch = next_batch
        self.next_examples = next_examples
        self.figures: dict[str, float] = {}
        self.notices: list[str] = []
        self.prepare()

    @staticmethod
    @abstractmethod
    def roles(config: Config) -> Sequence[str]:
        """Worker groups that it needs."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Makes what lives from step to step."""

    @abstractmethod
    def step(self) -> tuple[BatchRef, list[Handle]]:
        """One step: the samples that it learned from, and a handle on the metrics of each update.

        It returns as soon as everything is called; nothing need have run.
        """

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Figures of the held-out data: by default those of the answers to its prompts."""
        return evaluate_answers(
            self.groups["actor"], self.groups["reward"], held_out, self.sampling, self.config
        )

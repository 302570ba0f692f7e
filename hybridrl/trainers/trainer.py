"""Trainer: what every driver program has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import Config, is_served
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.evaluation.held_out_metrics import evaluate_answers
from hybridrl.evaluation.scored_samples import Drawn
from hybridrl.rollout import Sampling
from hybridrl.systems.low_bits.role_plans import precision_notices
from hybridrl.trainers.data_feed import Feed
from hybridrl.trainers.episode_branches import parts_of_groups
from hybridrl.trainers.kl_coefficient import notices_of_kl
from hybridrl.trainers.objectives import policy_objective
from hybridrl.trainers.role_spec import ACTOR, RoleSpec, checked_roles
from hybridrl.trainers.update_columns import loss_weights

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
        feed: The data.

    Attributes:
        DATA: What a step learns from: `prompts`, `examples` with their responses, or `pairs` of a
            better and a worse response, as neighbouring rows.
        TRAINS: False for a program that only evaluates.
        figures: The program's own numbers of this step, written with its metrics.
        notices: Sentences for the user, shown after the step.
        beside: Samples of this step that are not among those that `step` returns or that are noted,
            by how the names of their figures are to begin: `greedy` gives `greedy/reward/mean`.
            Those that have no name here begin with `other`.
        drawn: Samples of the last evaluation, by the role that gave them; the run keeps them.
    """

    DATA: ClassVar[Literal["prompts", "examples", "pairs"]] = "prompts"
    TRAINS: ClassVar[bool] = True

    def __init__(
        self, config: Config, groups: Mapping[str, WorkerGroup], sampling: Sampling, feed: Feed
    ) -> None:
        self.config = config
        self.groups = groups
        self.sampling = sampling
        self.feed = feed
        self.figures: dict[str, float] = {}
        self.notices = [*notices_of_kl(config), *precision_notices(config, groups)]
        self.scored: list[BatchRef] = []
        self.beside: dict[str, BatchRef] = {}
        self.drawn: dict[str, list[Drawn]] = {}
        self._dealt, self._passes = -1, 0
        self.prepare()

    @staticmethod
    @abstractmethod
    def roles(config: Config) -> Mapping[str, RoleSpec] | Sequence[str]:
        """Its roles: a mapping of names to what a `RoleSpec` says of them, of which
        `role_spec.standard("actor", "reward")` gives those that the built-in programs have. Where
        these are all, their names are enough: `["actor", "reward"]`."""

    @staticmethod
    def objective(config: Config) -> Any:
        """The loss of `update_actor` and `update_preference`: `(outputs, columns, segments)` to a
        `TokenLoss`. By default the policy loss of `algorithm`."""
        return policy_objective(config)

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Makes what lives from step to step."""

    @abstractmethod
    def step(self) -> tuple[BatchRef, list[Handle]]:
        """One step: the samples that it learned from, and a handle on the metrics of each update.

        It returns as soon as everything is called; nothing need have run.
        """

    def evaluate(self, held_out: BatchRef) -> dict[str, float]:
        """Figures of the held-out data: by default those of the answers to its prompts, by the
        role `actor` and by every other one that samples, whose figures begin with its name; none
        for a program without a reward."""
        found: dict[str, float] = {}
        if "reward" not in self.groups:  # nobody says what is right
            return found
        roles = checked_roles(self.roles(self.config), type(self).__qualname__)
        for role, spec in roles.items():
            if not spec.generates:
                continue
            drawn = self.drawn[role] = list[Drawn]()
            figures = evaluate_answers(
                *(self.groups[role], self.groups["reward"], held_out, self.sampling, self.config),
                drawn,
            )
            prefix = "" if role == ACTOR else f"{role}/"
            found |= {f"{prefix}{name}": value for name, value in figures.items()}
        return found

    def state(self) -> dict[str, Any]:
        """What lives from step to step, as plain data: numbers, texts, lists, dictionaries."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Goes on where the program that gave `state` stopped."""

    @property
    def data(self) -> Batch:
        """The training rows, tokenized."""
        return self.feed.data

    @property
    def tokenizer(self) -> Any:
        """That of the model."""
        return self.feed.tokenizer

    def put(self, batch: Batch) -> BatchRef:
        """Hands a batch of the driver's to the workers."""
        return self.feed.put(batch)

    def next_batch(self) -> BatchRef:
        """The prompts (examples, pairs) of the next step."""
        return self.feed.next_batch()

    def next_examples(self, coefficient: float) -> BatchRef:
        """Prompts with their right responses, for a supervised update of this weight."""
        return self.feed.next_examples(coefficient)

    def note_scores(self, samples: BatchRef) -> BatchRef:
        """Has the sampler of the data learn the `scores` of these samples when the step has ended;
        returns them. Without a note it learns those of the samples that `step` returns."""
        self.scored.append(samples)
        return samples

    def mini_batches(self, batch: BatchRef) -> Iterator[BatchRef]:
        """The batch in `actor.updates_per_step` parts, each token with its weight in the loss of
        its part. Parts are whole: all samples of a prompt, all rows of an episode, both of a pair;
        where there are fewer prompts than parts, samples. Their order is drawn from `run.seed` and
        the step, and drawn again for each pass over a step's batch."""
        config = self.config
        sampled = self.DATA == "prompts"
        longest = config.rollout.max_tokens if sampled else config.data.max_response_tokens
        weigh = partial(loss_weights, mode=config.algorithm.aggregation, longest=longest)
        parts, episode = config.actor.updates_per_step, []
        if is_served(config.rollout, config.environment) and batch.columns.may_have("episode"):
            episode = ["episode"]
        dealt = self.feed.numbered
        self._passes = self._passes + 1 if dealt == self._dealt else 0
        self._dealt = dealt
        cut = [batch]
        if parts > 1:
            drawn = config.run.seed, dealt, self._passes
            cut = parts_of_groups(batch, parts, *drawn, pairs=self.DATA == "pairs")
        for part in cut:
            yield part | part.apply(weigh, ["response_mask", *episode], makes=["loss_weights"])

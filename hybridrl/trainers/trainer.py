"""The base classes of all driver programs, and what a step of theirs returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from hybridrl.batch.batch import Batch
from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config, is_served
from hybridrl.controller import BatchRef, Handle, WorkerGroup
from hybridrl.evaluation.held_out_metrics import evaluate_responses
from hybridrl.evaluation.scored_samples import ScoredSamplesRef
from hybridrl.rollout import SamplingSettings
from hybridrl.trainers.data_feed import DataFeed
from hybridrl.trainers.episode_branches import parts_of_groups
from hybridrl.trainers.objectives import build_policy_objective
from hybridrl.trainers.role_spec import ACTOR_ROLE, RoleSpec, validate_roles
from hybridrl.trainers.update_columns import loss_weights

SAMPLE_COLUMNS = ("prompt_ids", "response_ids")
"""What a model needs to score a sample."""
UPDATE_COLUMNS = (*SAMPLE_COLUMNS, "response_mask", "loss_weights")
"""What every update needs of it besides."""
ROLLOUT_COLUMNS = ("rollout_log_probs", "policy_version")
"""What an update needs to know of the policy that made it."""


SHAPING = frozenset({"reward.shorter", "reward.normalise_by"})
"""Settings of what is done to scores before they are learned from."""
_OWN_WAYS = {
    *("algorithm.dynamic_sampling", "algorithm.replay_share", "rollout.partial", "actor.max_kl"),
    *SHAPING,
}
_USUAL = frozenset(
    name
    for name in trainer_settings("grpo", "ppo", "remax", "safe_rlhf", "sft", "dpo", "kto")
    if name not in _OWN_WAYS and not name.startswith("preference")
)
"""Settings that the methods here read, and the functions that trainers share: of data, losses,
credit and critics."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step of a trainer.

    Attributes:
        batch: The samples that the step learned from.
        updates: A handle on the metrics of each update.
        metrics: Numbers of the trainer's own, which are written with those of this step.
        notices: Sentences for the user, shown after the step.
        scored_samples: Samples whose `scores` the sampler of the data learns when the step has
            ended. Empty: those of `batch`.
        other_samples: Samples that the step drew and that are in neither, by the beginning of the
            names of their metrics: `greedy` gives `greedy/reward/mean`. Those that no name is
            given for begin with `other`.
    """

    batch: BatchRef
    updates: Sequence[Handle] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    notices: Sequence[str] = ()
    scored_samples: Sequence[BatchRef] = ()
    other_samples: Mapping[str, BatchRef] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        """Unpack as `batch, updates`, which is all that many trainers return."""
        return iter((self.batch, self.updates))


class EvaluationResult(dict[str, float]):
    """Metrics of held-out data by name.

    Attributes:
        samples: The samples that they were computed from, by the role that drew them.
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        samples: Mapping[str, list[ScoredSamplesRef]] | None = None,
    ) -> None:
        super().__init__(metrics)
        self.samples = dict(samples or {})

    def __or__(self, other: Mapping[str, float]) -> EvaluationResult:  # type: ignore[override]
        return EvaluationResult({**self, **other}, self.samples)


class Trainer(ABC):
    """A driver program that learns: `step` is the dataflow of its algorithm, which no other code
    knows.

    Args:
        groups: The worker groups that `roles` asks for.
        sampling: How samples are drawn while training.
        feed: The data.

    Attributes:
        DATA: What a step learns from: `prompts`, `examples` with their responses, `pairs` of a
            better and a worse response, as neighbouring rows, or `responses` with a `label`, 1 for
            good ones and 0 for bad ones.
        TRAINS: False for a program that only evaluates.
        USES: Settings that it reads, of those that not every trainer does; the others are refused.
            A trainer of one's own adds to those of its base class:
            `USES = PolicyTrainer.USES | {"algorithm.dynamic_sampling"}`.
        UNREAD_REASONS: Why it does not read a setting that others read; said when it is refused.
        COMPARES_SAMPLES: Whether it learns from how the samples of a prompt differ.
        is_served: Whether programs produce the samples, so that one may have several branches.
    """

    DATA: ClassVar[Literal["prompts", "examples", "pairs", "responses"]] = "prompts"
    TRAINS: ClassVar[bool] = True
    USES: ClassVar[frozenset[str]] = _USUAL
    UNREAD_REASONS: ClassVar[Mapping[str, str]] = {
        "algorithm.dynamic_sampling": "it does not compare the samples of a prompt",
        "algorithm.step_credit": "it knows one score a sample",
        "actor.epochs": "it learns once from what a step gives it",
        "reward.normalise_by": "it learns from scores as they are",
        "reward.shorter": "it learns from scores as they are",
    }
    COMPARES_SAMPLES: ClassVar[bool] = False

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, WorkerGroup],
        sampling: SamplingSettings,
        feed: DataFeed,
    ) -> None:
        self.config = config
        self.groups = groups
        self.sampling = sampling
        self.feed = feed
        self.is_served = is_served(config.rollout, config.environment)
        self._dealt, self._passes = -1, 0
        self.prepare()

    @staticmethod
    @abstractmethod
    def roles(config: Config) -> Mapping[str, RoleSpec] | Sequence[str]:
        """Return the roles: a mapping of names to `RoleSpec`s, of which `standard_roles("actor",
        "reward")` returns those of the built-in programs. If these are all, a list of names is
        enough: `["actor", "reward"]`."""

    @staticmethod
    def objective(config: Config) -> Any:
        """Return the loss of `update_actor` and `update_preference`: a function from `(outputs,
        columns, segments)` to a `TokenLoss`. The default is the policy loss of `algorithm`."""
        return build_policy_objective(config)

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Create the state that the program keeps between steps."""

    @abstractmethod
    def step(self) -> StepResult | tuple[BatchRef, list[Handle]]:
        """Make one step: a `StepResult`, or only its first two parts, the samples that it learned
        from and a handle on the metrics of each update.

        It returns as soon as everything is called; nothing need have run.
        """

    def evaluate(self, held_out: BatchRef) -> Mapping[str, float]:
        """Return metrics of the held-out data. By default they are those of the responses to its
        prompts, sampled by the role `actor` and by every other role that generates, whose metrics
        begin with its name; none for a program without a reward."""
        found: dict[str, float] = {}
        samples: dict[str, list[ScoredSamplesRef]] = {}
        if "reward" not in self.groups:  # nobody says what is right
            return found
        roles = validate_roles(self.roles(self.config), type(self).__qualname__)
        for role, spec in roles.items():
            if not spec.generates:
                continue
            actor, reward = self.groups[role], self.groups["reward"]
            figures, samples[role] = evaluate_responses(
                actor, reward, held_out, self.sampling, self.config
            )
            prefix = "" if role == ACTOR_ROLE else f"{role}/"
            found |= {f"{prefix}{name}": value for name, value in figures.items()}
        return EvaluationResult(found, samples)

    def compute_held_out_loss(self, held_out: BatchRef) -> float | None:
        """Return the loss of held-out data, by which `actor.optimizer.schedule=auto` judges long
        trials of learning rates; None: it judges them by the losses of their steps."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the state that the program keeps between steps, as plain data: numbers, strings,
        lists, dictionaries."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore what `state` returned in an earlier process."""

    @property
    def data(self) -> Batch:
        """The training rows, tokenized."""
        return self.feed.data

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.feed.tokenizer

    def put(self, batch: Batch) -> BatchRef:
        """Send a batch of the driver to the workers, as `ray.put`."""
        return self.feed.put(batch)

    def next_batch(self) -> BatchRef:
        """Return the prompts, examples or pairs of the next step."""
        return self.feed.next_batch()

    def next_examples(self, coefficient: float) -> BatchRef:
        """Return prompts with their reference responses for a supervised update with this loss
        coefficient."""
        return self.feed.next_examples(coefficient)

    def mini_batches(self, batch: BatchRef, epochs: int | None = None) -> Iterator[BatchRef]:
        """The batch in `actor.updates_per_step` parts, each token with its weight in the loss of
        its part, in each of `epochs` passes (None: `actor.epochs`). Parts are whole: all samples of
        a prompt, all rows of an episode, both of a pair; where there are fewer prompts than parts,
        samples. Their order is drawn from `run.seed` and the step, and drawn again for each pass
        over a step's batch."""
        config = self.config
        sampled = self.DATA == "prompts"
        longest = config.rollout.max_tokens if sampled else config.data.max_response_tokens
        weigh = partial(loss_weights, mode=config.algorithm.aggregation, longest=longest)
        parts, episode = config.actor.updates_per_step, []
        if self.is_served and batch.columns.may_have("episode"):
            episode = ["episode"]
        dealt = self.feed.numbered
        for _ in range(config.actor.epochs if epochs is None else epochs):
            self._passes = self._passes + 1 if dealt == self._dealt else 0
            self._dealt = dealt
            cut = [batch]
            if parts > 1:
                drawn = config.run.seed, dealt, self._passes
                cut = parts_of_groups(batch, parts, *drawn, pairs=self.DATA == "pairs")
            for part in cut:
                yield part | part.apply(weigh, ["response_mask", *episode], makes=["loss_weights"])

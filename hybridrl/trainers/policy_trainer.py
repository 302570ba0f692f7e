"""The base class of trainers that sample, score and reinforce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hybridrl.algorithms import AdaptiveKLController, FixedKLController
from hybridrl.algorithms.kl_divergence import REWARD_KL_ESTIMATOR
from hybridrl.algorithms.policy_objective import find_advantage_estimator, has_parameter
from hybridrl.config.schema import Config, is_served
from hybridrl.controller import BatchRef, Handle
from hybridrl.rewards.loading import make_short_names, resolve_functions
from hybridrl.trainers import trainer as base
from hybridrl.trainers.episode_branches import unfold_episodes
from hybridrl.trainers.partial_rollouts import PartialRollouts
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.score_shaper import ScoreShaper, shapes
from hybridrl.trainers.trainer import ROLLOUT_COLUMNS, SAMPLE_COLUMNS, UPDATE_COLUMNS
from hybridrl.trainers.update_columns import SHAPED, STEPS, TURN_COLUMNS


class PolicyTrainer(base.Trainer):
    """A trainer with the usual start of a step, sampling and scoring, and its usual end, updating.

    Attributes:
        ROLES: Those that it always has; with a KL there is a reference too.
        CRITICS: Roles that learn values, and the columns that they learn from.
        kl: The weight of the KL from step to step.
        shaping: What becomes of scores before they are learned from.
        partial: The samples that go on from step to step; None without `rollout.partial`.
        credited: The columns that giving credit needs besides scores.
    """

    USES = base.Trainer.USES | base.SHAPING | {"rollout.partial", "actor.max_kl"}
    ROLES: ClassVar[Sequence[str]] = ("actor", "reward")
    CRITICS: ClassVar[Mapping[str, Sequence[str]]] = {}

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return standard_roles(
            *cls.ROLES, *(["reference"] if config.algorithm.kl_coefficient else [])
        )

    def prepare(self) -> None:
        self.kl = KLCoefficient(self.config)
        self.shaping = ScoreShaper(self.config)
        self.credited = list_credit_columns(self.config)
        self.partial = None
        if self.config.rollout.partial is not None:
            self.partial = PartialRollouts(self.config, self.groups["actor"], self.feed)
        self.steps = 0
        self.episodes = 0

    def samples(self) -> BatchRef:
        """Generate the samples of this step: its prompts with responses, one row per sample or
        episode."""
        prompts = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        if self.partial is not None:
            return self.partial.draw(prompts, self.sampling)
        drawn: BatchRef = self.groups["actor"].generate_sequences(prompts, self.sampling)
        return prompts | drawn

    def unfold(
        self, samples: BatchRef, judged: Sequence[BatchRef]
    ) -> tuple[BatchRef, list[BatchRef]]:
        """Return the rows to learn from, and the rewards of each. They are the samples themselves,
        except where episodes may have several branches: then there is a row for each branch, none
        for an episode without a reward or in which nothing was sampled, and this waits for them."""
        if not self.is_served:
            return samples, list(judged)
        # Numbers of their own: with those of earlier steps they may be learned from together.
        first, self.episodes = self.episodes, self.episodes + len(samples)
        rows, of = unfold_episodes(samples, self.put, self.groups["actor"], first)
        return rows, [of(one) for one in judged]

    def judge(self, samples: BatchRef) -> list[BatchRef]:
        """Compute `scores`, and `costs` if the program has a cost role."""
        judges = [self.groups[name] for name in ("reward", "cost") if name in self.groups]
        return [judge.compute_reward(samples) for judge in judges]

    def rewarded(self, samples: BatchRef) -> list[BatchRef]:
        """Compute scores like `judge`, and shape them for learning if the settings ask for it."""
        judged = self.judge(samples)
        if not self.shaping.changes:
            return judged
        return [*judged, self.shaping.shaped(join_columns(samples, judged))]

    def score(self, samples: BatchRef, *, log_probs: bool = True) -> list[BatchRef]:
        """Compute the columns of the models before the update: `ref_log_probs`, `log_probs`,
        values. Like `judge` this reads only the samples, so that calls on different
        devices need not wait for each other; join the results afterwards. Calls of models that only
        score are made first, because the trained ones usually occupy all devices.

        Args:
            log_probs: Whether those of the actor are needed.
        """
        groups, tokens = self.groups, samples.select(*SAMPLE_COLUMNS)
        found = []
        if "reference" in groups:
            found.append(groups["reference"].compute_ref_log_prob(tokens))
        if log_probs:
            found.append(groups["actor"].compute_log_prob(tokens))
        return found + [groups[critic].compute_values(tokens) for critic in self.CRITICS]

    def learn(self, batch: BatchRef, *columns: str) -> list[Handle]:
        """One optimizer step of every critic and of the actor on each mini-batch of their epochs,
        the actor's after `critic.warmup_steps`.

        Args:
            columns: That the actor's update needs besides those that every program has.
        """
        config, actor = self.config, self.groups["actor"]
        reference = ["ref_log_probs"] if "reference" in self.groups else []
        needed = (*UPDATE_COLUMNS, *ROLLOUT_COLUMNS, "advantages", *columns, *reference)
        handles, learns = [], self.steps >= config.critic.warmup_steps
        epochs = of_critics = config.actor.epochs
        if self.CRITICS:
            of_critics = config.critic.epochs or epochs
        further: dict[str, bool] = {}
        for epoch in range(max(epochs, of_critics)):
            for part in self.mini_batches(batch, epochs=1):
                for critic, learned in self.CRITICS.items() if epoch < of_critics else ():
                    update = self.groups[critic].update_critic
                    handles.append(update(part.select(*UPDATE_COLUMNS, *learned)))
                if learns and epoch < epochs:
                    updated = actor.update_actor(part.select(*needed), **further)
                    handles.append(self.kl.watch(updated))
                    further = {"goes_on": True} if config.actor.max_kl is not None else {}
        if learns and (coefficient := config.algorithm.ptx_coefficient) > 0:
            actor.update_supervised(self.next_examples(coefficient))
        self.steps += 1
        return handles

    def state(self) -> dict[str, Any]:
        found = {"steps": self.steps, "episodes": self.episodes, "kl": self.kl.state()}
        found |= {"partial": self.partial.state()} if self.partial is not None else {}
        return found | ({"shaping": self.shaping.state()} if self.shaping.changes else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps, self.episodes = state["steps"], state.get("episodes", 0)
        self.kl.load_state(state["kl"])
        self.shaping.load_state(state.get("shaping", {}))
        if self.partial is not None:
            self.partial.load_state(state.get("partial"))


def join_columns(batch: BatchRef, others: Iterable[BatchRef]) -> BatchRef:
    """Join batches side by side, row by row."""
    for other in others:
        batch |= other
    return batch


TOKENS = ("tokens", "critic_tokens", "cost_critic_tokens")


class KLCoefficient:
    """A coefficient that adapts to the KL measured by the updates of the step before. A constant
    one measures nothing and waits for nothing."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._adapts = algorithm.kl_target is not None
        if algorithm.kl_target is None:
            self._controller: FixedKLController | AdaptiveKLController = FixedKLController(
                algorithm.kl_coefficient
            )
        else:
            self._controller = AdaptiveKLController(
                algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon
            )
        self._samples = config.data.prompts_per_step * config.rollout.samples_per_prompt
        self._watched: list[Handle] = []

    @property
    def coefficient(self) -> float:
        """The current coefficient."""
        return self._controller.coefficient

    def watch(self, update: Handle) -> Handle:
        """Remember an update of the actor whose KL counts for the next `update`; return it."""
        if self._adapts:
            self._watched.append(update)
        return update

    def update(self) -> float:
        """Adapt to the KL of the remembered updates and return the coefficient for the new step."""
        found = [update.get() for update in self._watched]
        self._watched.clear()
        if any("kl" in update for update in found):
            self._controller.update(mean_of_updates("kl", found), self._samples)
        return self.coefficient

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, after waiting for the remembered updates."""
        self.update()
        return self._controller.state()

    def load_state(self, state: dict[str, float]) -> None:
        self._controller.load_state(state)


def list_kl_notices(config: Config) -> list[str]:
    """Return a warning if the KL estimator of a KL in the reward has not the gradient of the KL,
    else nothing."""
    algorithm = config.algorithm
    estimator = algorithm.kl_estimator or REWARD_KL_ESTIMATOR
    if not algorithm.kl_in_reward or estimator.removesuffix("+") == REWARD_KL_ESTIMATOR:
        return []
    return [
        f"algorithm.kl_estimator={estimator} with algorithm.kl_in_reward=true: in the reward only "
        "k1 has the gradient of the KL; the others hold the policy by a fraction of it, in another "
        "direction. Leave algorithm.kl_estimator out for k1."
    ]


def mean_of_updates(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    """Return the mean of a metric over the updates that have it, weighted by their tokens."""
    found = [update for update in updates if name in update]
    tokens = [_tokens(update) for update in found]
    weights = [number for number in tokens if number is not None]
    if len(weights) < len(found) or not (total := math.fsum(weights)):
        weights, total = [1.0] * len(found), float(len(found))
    return math.fsum(w * update[name] for w, update in zip(weights, found, strict=True)) / total


def _tokens(update: Mapping[str, float]) -> float | None:
    """Return the tokens that an update, of whatever role, learned from; None if it does not say."""
    return next((x for name, x in update.items() if name in TOKENS), None)


def list_credit_columns(config: Config) -> list[str]:
    """The columns that giving credit needs besides scores: these as they are learned from, where
    that are others; which rows are of one episode, where they may be several; and what was rewarded
    in which turn or step, where that counts."""
    found = [SHAPED] if shapes(config.reward) else []
    found += ["episode"] if is_served(config.rollout, config.environment) else []
    found += TURN_COLUMNS if config.algorithm.turn_credit == "turn" else []
    return [*found, *(STEPS if config.algorithm.step_credit else [])]


def list_separate_rewards(config: Config) -> dict[str, float]:
    """Return the columns of the scores that functions, judge and reward model gave, with their
    weights, if `algorithm.advantage` learns from each by itself; else nothing."""
    if not has_parameter(find_advantage_estimator(config.algorithm.advantage), "reward_scores"):
        return {}
    reward = config.reward
    functions, weights = resolve_functions(reward)
    found = {f"reward/{n}": w for n, w in zip(make_short_names(functions), weights, strict=True)}
    if reward.judge.path is not None:
        found["reward/judge"] = reward.judge.weight
    if reward.model is not None:
        found["reward/model"] = reward.model_weight
    return {name: weight for name, weight in found.items() if weight}

"""PolicyTrainer: what the programs have in common that sample, score and reinforce."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hybridrl.config.schema import Config, is_served
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import trainer as base
from hybridrl.trainers.credited_samples import credit_columns
from hybridrl.trainers.episode_branches import unfold
from hybridrl.trainers.kl_coefficient import KLCoefficient
from hybridrl.trainers.reward_shaper import RewardShaping
from hybridrl.trainers.role_spec import RoleSpec, standard
from hybridrl.trainers.trainer import LEARNED_FROM, SAMPLE, SAMPLED


class PolicyTrainer(base.Trainer):
    """The head of a step, which samples and scores, and its tail, which updates.

    Attributes:
        ROLES: Those that it always has; with a KL there is a reference too.
        CRITICS: Roles that learn values, and the columns that they learn from.
        kl: The weight of the KL from step to step.
        shaping: What becomes of scores before they are learned from.
        credited: The columns that giving credit needs besides scores.
    """

    USES = base.Trainer.USES | base.SHAPING
    ROLES: ClassVar[Sequence[str]] = ("actor", "reward")
    CRITICS: ClassVar[Mapping[str, Sequence[str]]] = {}

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return standard(*cls.ROLES, *(["reference"] if config.algorithm.kl_coefficient else []))

    def prepare(self) -> None:
        self.kl = KLCoefficient(self.config)
        self.shaping = RewardShaping(self.config)
        self.credited = credit_columns(self.config)
        self.steps = 0
        self.episodes = 0

    def samples(self) -> BatchRef:
        """Prompts of this step with their responses; of episodes, a row for each."""
        prompts = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        return prompts | self.groups["actor"].generate_sequences(prompts, self.sampling)

    def unfold(
        self, samples: BatchRef, judged: Sequence[BatchRef]
    ) -> tuple[BatchRef, list[BatchRef]]:
        """The rows to learn from, and what was judged of each: the samples themselves, but for
        episodes that may have several branches; then one for each, and this waits for them."""
        if not is_served(self.config.rollout, self.config.environment):
            return samples, list(judged)
        # Numbers of their own: with those of earlier steps they may be learned from together.
        first, self.episodes = self.episodes, self.episodes + len(samples)
        rows, of = unfold(samples, self.put, self.groups["actor"], first)
        return rows, [of(one) for one in judged]

    def judge(self, samples: BatchRef) -> list[BatchRef]:
        """`scores`, and `costs` where the program has them."""
        judges = [self.groups[name] for name in ("reward", "cost") if name in self.groups]
        return [judge.compute_reward(samples) for judge in judges]

    def rewarded(self, samples: BatchRef) -> list[BatchRef]:
        """As `judge`, with the scores as they are to be learned from, where these are others."""
        judged = self.judge(samples)
        if not self.shaping.changes:
            return judged
        return [*judged, self.shaping.shaped(joined(samples, judged))]

    def score(self, samples: BatchRef, *, log_probs: bool = True) -> list[BatchRef]:
        """What models say of samples before the step. As `judge` it asks for the samples alone, so
        that those on other devices need not wait for each other: join what they say afterwards.
        Those that only score come first, because what learns is on all devices, as a rule.

        Args:
            log_probs: Whether those of the actor are needed.
        """
        groups, tokens = self.groups, samples.select(*SAMPLE)
        found = []
        if "reference" in groups:
            found.append(groups["reference"].compute_ref_log_prob(tokens))
        if log_probs:
            found.append(groups["actor"].compute_log_prob(tokens))
        return found + [groups[critic].compute_values(tokens) for critic in self.CRITICS]

    def learn(self, batch: BatchRef, *columns: str) -> list[Handle]:
        """One optimizer step of every critic and of the actor on each mini-batch, the actor's after
        `critic.warmup_steps`.

        Args:
            columns: That the actor's update needs besides those that every program has.
        """
        config, actor = self.config, self.groups["actor"]
        reference = ["ref_log_probs"] if "reference" in self.groups else []
        needed = (*LEARNED_FROM, *SAMPLED, "advantages", *columns, *reference)
        handles, learns = [], self.steps >= config.critic.warmup_steps
        for part in self.mini_batches(batch):
            for critic, learned in self.CRITICS.items():
                update = self.groups[critic].update_critic
                handles.append(update(part.select(*LEARNED_FROM, *learned)))
            if learns:
                handles.append(self.kl.watch(actor.update_actor(part.select(*needed))))
        if learns and (coefficient := config.algorithm.ptx_coefficient) > 0:
            actor.update_supervised(self.next_examples(coefficient))
        self.steps += 1
        return handles

    def state(self) -> dict[str, Any]:
        found = {"steps": self.steps, "episodes": self.episodes, "kl": self.kl.state()}
        return found | ({"shaping": self.shaping.state()} if self.shaping.changes else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps, self.episodes = state["steps"], state.get("episodes", 0)
        self.kl.load_state(state["kl"])
        self.shaping.load_state(state.get("shaping", {}))


def joined(batch: BatchRef, others: Iterable[BatchRef]) -> BatchRef:
    """All of them side by side, row by row."""
    for other in others:
        batch |= other
    return batch

"""Online DPO: the best and the worst of a prompt's samples become a pair to learn from.

    python -m hybridrl.main algorithm=dpo trainer.name=examples/online_dpo.py:OnlineDPO

Guo et al. 2024, arXiv:2402.04792. `algorithm=dpo` brings the settings of the loss (`preference`);
that the actor learns by it is said here, by `objective`. A prompt whose samples score alike has no
pair and teaches nothing.
"""

from collections.abc import Mapping
from functools import partial

import torch

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers.base import LEARNED_FROM, SAMPLE
from hybridrl.trainers.objectives import preference_objective
from hybridrl.trainers.policy import PolicyTrainer
from hybridrl.trainers.role_spec import RoleSpec, standard
from hybridrl.trainers.shaping import loss_weights


class OnlineDPO(PolicyTrainer):
    """Pairs are neighbouring rows, the better one first."""

    @classmethod
    def roles(cls, config: Config) -> Mapping[str, RoleSpec]:
        return standard("actor", "reference", "reward")

    @staticmethod
    def objective(config: Config) -> object:
        return preference_objective(config)

    def step(self) -> tuple[BatchRef, list[Handle]]:
        samples = self.samples()
        samples |= self.groups["reward"].compute_reward(samples)
        scores = samples.collect(["scores"])["scores"]  # a number a sample
        scores = scores.view(-1, self.config.rollout.samples_per_prompt)
        ends = torch.stack([scores.argmax(1), scores.argmin(1)], dim=1)
        rows = ends + torch.arange(len(scores))[:, None] * scores.shape[1]
        differ = scores.amax(1) > scores.amin(1)
        self.figures["pairs/prompts"] = float(differ.float().mean())
        pairs = samples.take(rows[differ].flatten().numpy())
        pairs |= self.groups["reference"].compute_ref_log_prob(pairs.select(*SAMPLE))
        weigh = partial(loss_weights, mode="seq-mean-token-mean")
        pairs |= pairs.apply(weigh, ["response_mask"], makes=["loss_weights"])
        learned = pairs.select(*LEARNED_FROM, "ref_log_probs")
        return samples, [self.groups["actor"].update_preference(learned)]

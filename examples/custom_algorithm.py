"""An algorithm of your own, of three parts that work alone or together:

    python -m hybridrl.main algorithm.advantage=examples/custom_algorithm.py:against_median
    python -m hybridrl.main algorithm.policy_loss=examples/custom_algorithm.py:quadratic
    python -m hybridrl.main trainer.name=examples/custom_algorithm.py:Imitate

An advantage and a loss get what their parameters name. Of a loss, every further parameter with a
default is an option: the setting `algorithm.<name>` if there is one, else
`algorithm.loss_options.<name>`.
"""

from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms import TokenLoss
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers.trainer import UPDATE_COLUMNS, Trainer
from hybridrl.trainers.update_columns import loss_weights


def against_median(scores: Tensor, groups: Tensor) -> Tensor:
    """How much better than the median answer to its prompt: one good answer among bad ones counts
    in full, and the bad ones count nothing."""
    _, group = groups.unique(return_inverse=True)
    members = [scores[group == number].median() for number in range(int(group.max()) + 1)]
    return scores - torch.stack(members)[group]


def quadratic(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, reach: float = 0.2
) -> TokenLoss:
    """Simple policy optimisation (arXiv:2401.16025): a parabola holds the ratio within reach,
    where PPO clips it. Metrics are means over tokens; a name with a slash is written as it is."""
    ratio = (log_probs - old_log_probs).exp()
    away = (ratio - 1).square()
    loss = -advantages * ratio + advantages.abs() / (2 * reach) * away
    return TokenLoss(loss, {"policy/away": away.detach()})


class Imitate(Trainer):
    """Rejection sampling (arXiv:2304.06767): supervised learning of the samples that are better
    than the others of their prompt. A step in which all are alike teaches nothing."""

    @staticmethod
    def roles(config: Config) -> list[str]:
        return ["actor", "reward"]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        actor, reward = self.groups["actor"], self.groups["reward"]
        per_prompt = self.config.rollout.samples_per_prompt
        batch = self.next_batch().repeat(per_prompt)
        batch |= actor.generate_sequences(batch, self.sampling)
        batch |= reward.compute_reward(batch)
        scores = batch.collect(["scores"])["scores"].view(-1, per_prompt)  # a number a sample
        rows = (scores > scores.mean(1, keepdim=True)).flatten().nonzero().flatten()
        if not len(rows):
            return batch, []
        best = batch.take(rows.numpy())
        best |= best.apply(partial(loss_weights, mode="token-mean"), ["response_mask"])
        return batch, [actor.update_supervised(best.select(*UPDATE_COLUMNS))]

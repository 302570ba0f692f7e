"""Expert iteration: supervised learning of a model's own right answers, each different one once.

    python -m hybridrl.main trainer.name=examples/expert_iteration.py:ExpertIteration

Zelikman et al. 2022 (STaR), arXiv:2203.14465; Singh et al. 2023 (ReST-EM), arXiv:2312.06585. An
answer that comes often counts no more than one that comes rarely, so prompts that are easy already
do not drown the others. A step learns from the answers of the last `KEPT` steps together.
"""

from collections import deque
from collections.abc import Sequence

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers.base import LEARNED_FROM, Trainer

KEPT = 4


class ExpertIteration(Trainer):
    """The answers stay with the workers that made them; a number and a text of each come here."""

    @staticmethod
    def roles(config: Config) -> Sequence[str]:
        return ["actor", "reward"]

    def prepare(self) -> None:
        self.pool: deque[BatchRef] = deque(maxlen=KEPT)

    def step(self) -> tuple[BatchRef, list[Handle]]:
        actor, reward = self.groups["actor"], self.groups["reward"]
        samples = self.next_batch().repeat(self.config.rollout.samples_per_prompt)
        samples |= actor.generate_sequences(samples, self.sampling)
        samples |= reward.compute_reward(samples)
        seen = samples.collect(["group_id", "response", "scores"]).to_pylist()
        first: dict[tuple[int, str], int] = {}
        for number, row in enumerate(seen):
            if row["scores"] >= self.config.reward.correct_at:
                first.setdefault((row["group_id"], row["response"]), number)
        self.figures["expert/distinct"] = float(len(first))
        self.pool.append(samples.take(list(first.values())))
        parts = self.mini_batches(BatchRef.concat(list(self.pool)))
        return samples, [actor.update_supervised(part.select(*LEARNED_FROM)) for part in parts]

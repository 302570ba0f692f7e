"""GRPO as a program of your own: python examples/grpo_driver.py [trainer.steps=60 ...]"""

import sys

from hybridrl import Batch, Job, load_config
from hybridrl.algorithms import group_relative, token_weights
from hybridrl.run.warmup import warm_up


def advantages(batch: Batch) -> Batch:
    mask, real = batch.padded("response_mask")
    weights = token_weights(mask.bool(), "token-mean")[real]
    return Batch.from_columns(
        {
            "advantages": group_relative(batch["scores"], batch["group_id"]),
            "loss_weights": batch.ragged("response_mask")._replace(values=weights),
        }
    )


with Job(load_config(["run.name=driver", *sys.argv[1:]])) as job:
    actor, reward = job.groups["actor"], job.groups["reward"]
    warm_up(job)
    print(f"greedy accuracy {job.accuracy():.2f}")
    for step in range(job.config.trainer.steps):
        batch = job.next_batch().repeat(8)
        batch |= actor.generate_sequences(batch, job.sampling)
        batch |= reward.compute_reward(batch)
        batch |= batch.apply(advantages, ["scores", "group_id", "response_mask"])
        metrics = actor.update_actor(batch).get()
        mean = batch.collect(["scores"])["scores"].mean()
        print(f"step {step + 1}: reward {mean:.2f}, entropy {metrics['entropy']:.2f}")
    print(f"greedy accuracy {job.accuracy():.2f}")
    actor.save_model(str(job.directory.model.absolute())).get()

"""ReMax as a program of your own: python examples/remax_driver.py [trainer.steps=60 ...]"""

import sys

from hybridrl import Batch, Job, load_config
from hybridrl.algorithms import token_weights
from hybridrl.run.warmup import warm_up


def baseline(batch: Batch) -> Batch:
    return Batch.from_columns({"greedy_scores": batch["scores"]})


def advantages(batch: Batch) -> Batch:
    mask, real = batch.padded("response_mask")
    weights = token_weights(mask.bool(), "token-mean")[real]
    return Batch.from_columns(
        {
            "advantages": batch["scores"] - batch["greedy_scores"],
            "loss_weights": batch.ragged("response_mask")._replace(values=weights),
        }
    )


with Job(load_config(["algorithm=remax", "run.name=remax-driver", *sys.argv[1:]])) as job:
    actor, reward = job.groups["actor"], job.groups["reward"]
    warm_up(job)
    print(f"greedy accuracy {job.accuracy():.2f}")
    for step in range(job.config.trainer.steps):
        prompts = job.next_batch()
        greedy = prompts | actor.generate_sequences(prompts, job.sampling.greedy())
        greedy |= reward.compute_reward(greedy)
        batch = prompts.repeat(4)
        batch |= actor.generate_sequences(batch, job.sampling)
        batch |= reward.compute_reward(batch)
        batch |= greedy.apply(baseline, ["scores"]).repeat(4)
        batch |= batch.apply(advantages, ["scores", "greedy_scores", "response_mask"])
        actor.update_actor(batch).get()
        mean = batch.collect(["scores"])["scores"].mean()
        print(f"step {step + 1}: reward {mean:.2f}")
    print(f"greedy accuracy {job.accuracy():.2f}")
    actor.save_model(str(job.directory.model.absolute())).get()

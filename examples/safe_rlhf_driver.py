"""Safe-RLHF as a program of your own: python examples/safe_rlhf_driver.py [trainer.steps=60 ...]

The reward is a right sum; the cost is an odd answer, and at most 0.3 of the answers may be odd.
"""

import sys
from functools import partial

from hybridrl import Batch, Job, load_config
from hybridrl.algorithms import LagrangeMultiplier, divide_by_std, gae, shape_rewards, token_weights
from hybridrl.run.warmup import warm_up

SHAPED = ["scores", "costs", "response_mask", "values", "cost_values"]


def advantages(batch: Batch, multiplier: float) -> Batch:
    mask, real = batch.padded("response_mask")
    mask = mask.bool()
    none = 0.0 * mask

    def credit(scores: str, values: str):
        rewards = shape_rewards(batch[scores], mask, none, none, 0.0, "k1")
        return gae(rewards, batch.padded(values)[0], mask, lam=0.95)

    (good, returns), (bad, cost_returns) = credit("scores", "values"), credit("costs", SHAPED[-1])
    good, bad = divide_by_std(good, mask), divide_by_std(bad, mask)
    columns = {
        "advantages": (good - multiplier * bad) / (1 + multiplier),
        "returns": returns,
        "cost_returns": cost_returns,
        "loss_weights": token_weights(mask, "token-mean"),
    }
    ragged = batch.ragged("response_mask")
    return Batch.from_columns({k: ragged._replace(values=x[real]) for k, x in columns.items()})


with Job(load_config(["algorithm=safe_rlhf", "run.name=safe-driver", *sys.argv[1:]])) as job:
    groups, actor = job.groups, job.groups["actor"]
    multiplier = LagrangeMultiplier(initial=0.5, limit=0.3, rate=0.1)
    warm_up(job)
    for step in range(job.config.trainer.steps):
        batch = job.next_batch().repeat(8)
        batch |= actor.generate_sequences(batch, job.sampling)
        batch |= groups["reward"].compute_reward(batch)
        batch |= groups["cost"].compute_reward(batch)
        batch |= actor.compute_log_prob(batch)
        batch |= groups["critic"].compute_values(batch)
        batch |= groups["cost_critic"].compute_values(batch)
        batch |= batch.apply(partial(advantages, multiplier=multiplier.value), SHAPED)
        groups["critic"].update_critic(batch)
        groups["cost_critic"].update_critic(batch)
        actor.update_actor(batch).get()
        found = batch.collect(["scores", "costs"])
        reward, cost = float(found["scores"].mean()), float(found["costs"].mean())
        print(f"step {step + 1}: reward {reward:.2f}, cost {cost:.2f}, {multiplier.value:.2f}")
        multiplier.update(found["costs"])
    actor.save_model(str(job.directory.model.absolute())).get()

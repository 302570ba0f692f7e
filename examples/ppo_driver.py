"""PPO as a program of your own: python examples/ppo_driver.py [trainer.steps=60 ...]"""

import sys

from hybridrl import Batch, Job, load_config
from hybridrl.algorithms import gae, shape_rewards, token_weights, whiten
from hybridrl.run.warmup import warm_up

SETTINGS = ["algorithm=ppo", "algorithm.kl_coefficient=0.001", "run.name=ppo-driver"]
SHAPED = ["scores", "response_mask", "values", "log_probs", "ref_log_probs"]


def advantages(batch: Batch) -> Batch:
    mask, real = batch.padded("response_mask")
    mask = mask.bool()
    values, log_probs, reference = (batch.padded(name)[0] for name in SHAPED[2:])
    rewards = shape_rewards(batch["scores"], mask, log_probs, reference, 0.001, "k1")
    credit, returns = gae(rewards, values, mask, gamma=1.0, lam=0.95)
    columns = {
        "advantages": whiten(credit, mask),
        "returns": returns,
        "loss_weights": token_weights(mask, "token-mean"),
    }
    ragged = batch.ragged("response_mask")
    return Batch.from_columns({k: ragged._replace(values=x[real]) for k, x in columns.items()})


with Job(load_config([*SETTINGS, *sys.argv[1:]])) as job:
    actor, critic, reward, reference = (
        job.groups[role] for role in ("actor", "critic", "reward", "reference")
    )
    warm_up(job)
    print(f"greedy accuracy {job.accuracy():.2f}")
    for step in range(job.config.trainer.steps):
        batch = job.next_batch().repeat(8)
        batch |= actor.generate_sequences(batch, job.sampling)
        batch |= reward.compute_reward(batch)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= batch.apply(advantages, SHAPED)
        fit = critic.update_critic(batch)
        policy = actor.update_actor(batch)
        mean = batch.collect(["scores"])["scores"].mean()
        print(f"step {step + 1}: reward {mean:.2f}, value loss {fit.get()['critic_loss']:.3f}")
        policy.get()
    print(f"greedy accuracy {job.accuracy():.2f}")
    actor.save_model(str(job.directory.model.absolute())).get()

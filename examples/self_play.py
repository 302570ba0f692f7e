"""Self-play: one policy asks, another answers, and both learn from how it went.

    python -m hybridrl.main trainer.name=examples/self_play.py:SelfPlay

The asker sees a prompt `17+38=` and writes a second number; the solver, the role `actor`, is paid
for right sums. The asker is paid for sums that come out right half of the time (arXiv:1703.05407);
those who ask the same share the pay, or all would ask for one sum.
"""

from functools import partial

from hybridrl import Batch
from hybridrl.trainers.policy_trainer import PolicyTrainer
from hybridrl.trainers.role_spec import RoleSpec, standard_roles
from hybridrl.trainers.trainer import StepResult
from hybridrl.trainers.update_columns import GROUP_COLUMNS, group_advantages


class SelfPlay(PolicyTrainer):
    @classmethod
    def roles(cls, config):
        return {**standard_roles("actor", "reward"), "asker": RoleSpec("actor", saves_as="asker")}

    def step(self):
        asked = self.next_batch().repeat(tries := self.config.rollout.samples_per_prompt)
        asked |= self.groups["asker"].generate_sequences(asked, self.sampling)
        others, sums = {"asker": asked}, self.sums(asked.collect(["prompt", "response_ids"]))
        solved = self.put(sums).repeat(tries)
        solved |= self.groups["actor"].generate_sequences(solved, self.sampling)
        solved |= self.groups["reward"].compute_reward(solved)
        rate = solved.collect(["scores"])["scores"].view(-1, tries).mean(1)
        pay = 4 * rate * (1 - rate) / sums["times"]
        asked |= self.put(Batch.from_columns({"scores": pay}))
        updates = self.reinforced("actor", solved) + self.reinforced("asker", asked)
        return StepResult(solved, updates, {"asker/pay": float(pay.mean())}, other_samples=others)

    def sums(self, asked):
        texts = self.tokenizer.batch_decode(asked["response_ids"].rows(), skip_special_tokens=True)
        right = [int("".join(filter(str.isdigit, text))[:2] or 0) for text in texts]  # digits count
        both = zip(asked["prompt"], right, strict=True)
        prompts = [f"{prompt.partition('+')[0]}+{number}=" for prompt, number in both]
        answers = [str(sum(map(int, prompt[:-1].split("+")))) for prompt in prompts]
        columns = {"prompt": prompts, "prompt_ids": self.tokenizer(prompts)["input_ids"]}
        columns |= {"answer": answers, "times": [prompts.count(prompt) for prompt in prompts]}
        return Batch.from_columns(columns | {"group_id": range(len(prompts))})

    def reinforced(self, role, batch):
        compare = partial(group_advantages, config=self.config.algorithm, longest=8)
        batch |= batch.apply(compare, GROUP_COLUMNS, makes=["advantages", "response_mask"])
        return [self.groups[role].update_actor(part) for part in self.mini_batches(batch)]

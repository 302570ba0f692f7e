"""A curriculum: prompts that are answered right about half of the time are asked most.

    python -m hybridrl.main data.sampler=examples/curriculum.py:PassRate

A prompt whose samples are all right or all wrong has no signal for GRPO. The sampler keeps the pass
rate of every row of the data and draws by what it knows: what has not been asked yet comes first.
It works with every algorithm that learns from prompts, and in a loop of your own by
`job.next_batch()`. This is how a sampler of your own looks; `data.sampler=pass_rate` knows more.
"""

import numpy as np

MEMORY = 0.2
"""Weight of what was known of a prompt before it was asked again."""
LEAST = 0.02
"""So that a prompt that was too hard, or too easy, is tried again some time."""


class PassRate:
    """`rows` are those of the training data."""

    def __init__(self, rows, seed):
        self.random = np.random.default_rng(seed)
        self.rates = np.full(len(rows), 0.5)

    def draw(self, number):
        weights = self.rates * (1 - self.rates) + LEAST
        return self.random.choice(len(weights), number, replace=False, p=weights / weights.sum())

    def update(self, rows, scores):
        """Scores of all samples of a step, and of which row each is an answer."""
        for row in np.unique(rows):
            seen = scores[rows == row]
            known = seen[~np.isnan(seen)]  # NaN: the reward was dropped
            if len(known):
                self.rates[row] = MEMORY * self.rates[row] + (1 - MEMORY) * known.mean()

    def state(self):
        return {"rates": self.rates.tolist(), "random": self.random.bit_generator.state}

    def load_state(self, state):
        self.rates = np.array(state["rates"])
        self.random.bit_generator.state = state["random"]

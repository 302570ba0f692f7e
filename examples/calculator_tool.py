"""A tool of your own: the model asks a calculator and is paid for the right answer.

    python -m hybridrl.main data=calculator rollout.episode=examples/calculator_tool.py:Calculator

One object is made for each sample. `reset` gets the row of the data; `step` gets each turn of the
model, which ends at the end-of-sequence token or at a text of `rollout.stop` (here `>`), and says
what comes next. What the tool says is shown to the model and never learned. `rollout.max_turns`,
`rollout.max_tokens` (of the whole response) and `rollout.tool_timeout_s` bound an episode;
`reward.function=[]` leaves all reward to it, and functions named there are added.
"""

import asyncio

from hybridrl import Turn


class Calculator:
    async def reset(self, row):
        self.answer = row["answer"]
        self.calls = 0

    async def step(self, response_text, response_ids):
        if not response_text.endswith(">"):
            return Turn(reward=float(response_text == self.answer), done=True)
        self.calls += 1
        left, _, right = response_text.strip("<>").partition("*")
        if not (left.isdigit() and right.isdigit()) or self.calls > 1:
            return Turn(reward=-0.1, done=True)
        # A service would be asked here; the engine goes on with other samples in the meantime.
        await asyncio.sleep(0.001)
        return Turn(text=f"{int(left) * int(right)}=", reward=0.1)

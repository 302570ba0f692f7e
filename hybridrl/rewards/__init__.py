"""Reward functions: plain Python functions of the user, run in processes of their own.

A reward function is `def score(prompt, response, answer, **row)`, or `async def`, that returns a
number, or a dictionary with a number under `score` and any further numbers to keep beside it.
"""

from hybridrl.rewards.loading import function_list
from hybridrl.rewards.pool import RewardPool, RewardResult

__all__ = ["RewardPool", "RewardResult", "function_list"]

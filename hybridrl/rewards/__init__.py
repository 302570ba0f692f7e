"""Reward functions: plain Python functions of the user, run in processes of their own.

A reward function is `def score(prompt, response, answer, **row)`, or `async def`, that returns a
number, or a dictionary with a number under `score` and any further numbers to keep beside it. The
settings under `reward.options.<function>` are further keyword arguments.

A function whose first parameters are `completions`, or `prompts` and `completions`, as TRL's are,
is called once for all rows of a rank, with lists of texts and of every further column of the data,
and returns a list of numbers (None: the row is dropped). That one call has `reward.timeout_s`.

A module of reward functions may define `check_reward(options, timeout_s)`. Each reward process
calls it once for each of the module's functions that is used, before any row, with the function's
options and `reward.timeout_s`. It raises a `ConfigError` or an `UnsupportedMachineError` where they
or the machine will not do, and may return a line for the user to read.
"""

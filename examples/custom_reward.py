"""A reward of your own: partly right answers earn something.

    python -m hybridrl.main reward.function=examples/custom_reward.py:score

The function gets `prompt`, `response` and `answer` as text, and every other column of the data by
its name. It may be `async`, and may return a dictionary with more numbers beside `score`: they
become columns of the samples. It runs in a process of its own; `reward.on_error` says what happens
when it raises or takes longer than `reward.timeout_s`.
"""


def score(prompt: str, response: str, answer: str) -> dict[str, float]:
    digits = sum(ours == right for ours, right in zip(response, answer, strict=False))
    share = digits / max(len(response), len(answer))
    return {"score": 1.0 if response == answer else 0.5 * share, "digits_right": digits}

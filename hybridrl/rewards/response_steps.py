"""Steps of a response: where they end in its text and in its tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence


def step_ends(text: str, separator: str = "\n\n") -> list[int]:
    """Return the character after the end of each step, separators included; `separator` parts the
    steps, blank ones belong to the step before.

    A reward function may give its step scores by it:
    `{"steps": list(zip(step_ends(response), scores))}`.
    """
    ends: list[int] = []
    begin = 0
    for found in re.finditer(re.escape(separator), text):
        if text[begin : found.start()].strip():
            ends.append(found.end())
        elif ends:
            ends[-1] = found.end()
        begin = found.end()
    if text[begin:].strip():
        ends.append(len(text))
    elif ends:
        ends[-1] = len(text)
    return ends


def count_tokens_up_to(
    ends: Sequence[int], ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return the number of tokens up to each of these characters of the response, at least 1.

    Each is found by halving: texts of the first so many tokens grow with their number. A token that
    reaches over an end counts to the step that it begins in.
    """
    lengths: dict[int, int] = {}

    def length(tokens: int) -> int:
        if tokens not in lengths:
            lengths[tokens] = len(decode(ids[:tokens]))
        return lengths[tokens]

    numbers = range(len(ids) + 1)
    return [max(1, min(len(ids), bisect_left(numbers, end, key=length))) for end in ends]

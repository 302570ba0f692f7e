"""The task of adding two numbers below 40: `17+38=` has the answer `55`."""

from __future__ import annotations

import numpy as np

from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.tasks import split_problems

CHARACTERS = "0123456789+="

_OPERANDS = 40  # 0 to 39, so there are 1,600 problems in all
_LONGEST_TAIL = 5  # of an answer that is no number


def problems(
    count_held_out: int = 256, seed: int = 0, origin: RowOrigin = DATA
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return all 1,600 problems, shuffled by `seed` and split into `(train, held_out)`.

    No problem is in both parts; `a+b=` and `b+a=` count as two problems.

    Raises:
        ConfigError: if `count_held_out` leaves nothing to train on.
    """
    return split_problems("arithmetic", _OPERANDS, _problem, count_held_out, seed, origin)


def pairs(
    count_held_out: int = 256, seed: int = 0
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return pairs of the correct sum and a worse answer for the problems of
    `problems(count_held_out, seed)`.

    A problem to train on comes with each of its mistakes (off by one or by ten, the digits
    swapped), with some other number, and with something that is no number: nothing, an answer cut
    short, or one that runs on. A policy that learns from a reward model finds the last two, and a
    reward model that has not seen such answers may like them. A held-out problem comes with one of
    its mistakes, which are the hardest to tell.
    """
    training, held_out = problems(count_held_out, seed)
    random = np.random.default_rng([seed, 1])
    hardest = [
        _pair(row, str(random.choice(_plausible_mistakes(row["answer"])))) for row in held_out
    ]
    varied = []
    for row in training:
        right = row["answer"]
        worse = [
            *_plausible_mistakes(right),
            _other_number(right, random),
            _malformed_answer(right, random),
        ]
        varied += [_pair(row, wrong) for wrong in worse]
    return varied, hardest


def odd(prompt: str, response: str, **row: object) -> float:
    """Return 1 for a response that ends in an odd digit: a cost that half of the correct responses
    have, so that it conflicts with the reward."""
    return float(response[-1:] in tuple("13579"))


def _problem(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}


def _pair(problem: dict[str, str], wrong: str) -> dict[str, str]:
    annotator = f"annotator {int(problem['answer']) % 16}"
    answers = {"chosen": problem["answer"], "rejected": wrong}
    return {"prompt": problem["prompt"], **answers, "annotator": annotator}


def _plausible_mistakes(answer: str) -> list[str]:
    """Return plausible wrong answers: not negative, without leading zeros."""
    right = int(answer)
    near = {str(right + off) for off in (-10, -1, 1, 10) if right + off >= 0}
    swapped = {answer[::-1]} if not answer.endswith("0") else set()
    return sorted((near | swapped) - {answer})


def _other_number(answer: str, random: np.random.Generator) -> str:
    """Return the sum of another problem."""
    other = int(random.integers(2 * _OPERANDS - 2))
    return str(other + (other >= int(answer)))


def _malformed_answer(answer: str, random: np.random.Generator) -> str:
    """Return a malformed answer: empty, cut short, continued, or other characters."""
    tail = "".join(random.choice(list(CHARACTERS), random.integers(1, _LONGEST_TAIL + 1)))
    return str(random.choice(sorted({"", answer[:-1], answer + tail, tail} - {answer})))

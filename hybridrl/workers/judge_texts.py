"""What a judge wrote, read: grades and rankings."""

from __future__ import annotations

import math
import re


def read_grade(text: str, pattern: str, scale: float) -> float:
    """The last grade in what the judge wrote, from 0 to 1; NaN if there is none."""
    found = re.findall(pattern, text)
    try:
        grade = float(_group(found[-1])) / scale
    except (IndexError, ValueError):
        return math.nan
    return min(max(grade, 0.0), 1.0)


def read_ranking(text: str, pattern: str, answers: int) -> list[float]:
    """The score of each of so many answers, by the last ranking in what the judge wrote, such as
    `3 > 1 = 2`: 1 for the best of all, 0 for the worst, with equal steps between; answers that are
    equally good share the mean of their places. All NaN if it does not name each answer once.
    """
    found = re.findall(pattern, text)
    nobody = [math.nan] * answers
    if not found:
        return nobody
    places = [part.split("=") for part in _group(found[-1]).strip(" >=").split(">")]
    try:
        ranked = [[int(number) for number in tied] for tied in places]
    except ValueError:
        return nobody
    named = [number for tied in ranked for number in tied]
    if sorted(named) != list(range(1, answers + 1)):
        return nobody
    scores, place = nobody, 0
    for tied in ranked:
        mean = place + (len(tied) - 1) / 2
        for number in tied:
            scores[number - 1] = 1.0 - mean / max(1, answers - 1)
        place += len(tied)
    return scores


def _group(match: str | tuple[str, ...]) -> str:
    """Of a pattern with several groups the first."""
    return match if isinstance(match, str) else match[0]

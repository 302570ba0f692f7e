"""How far the clocks of hosts are apart, from messages between them.

A message takes its time and the difference of two clocks. Both ways together tell them apart: of
the quickest message each way, half of the difference is the clocks'. (dPRO, Hu et al., MLSys 2022,
aligns traces by the same constraint: nothing is received before it was sent.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LEAST_DOUBT = 1e-6
"""Seconds: no offset is known better."""


class Message(NamedTuple):
    """Attributes:
    sender, receiver: Hosts.
    sent, received: Seconds, each by its own host's clock.
    """

    sender: str
    receiver: str
    sent: float
    received: float


def clock_offsets(messages: Iterable[Message], reference: str) -> dict[str, float]:
    """By host, the seconds that its clock is ahead of the reference's. Of hosts that several ways
    lead to, all count, the quicker ones more. Hosts that no message leads to are left out.

    Between two hosts with messages in one direction only, these are taken to have been as quick as
    the quickest of all whose way is known both ways.
    """
    quickest: dict[tuple[str, str], float] = {}
    for message in messages:
        if message.sender != message.receiver:
            way, seconds = message[:2], message.received - message.sent
            quickest[way] = min(seconds, quickest.get(way, seconds))
    both = {
        (a, b): ((there - back) / 2, abs(there + back) / 2)
        for (a, b), there in quickest.items()
        if a < b and (back := quickest.get((b, a))) is not None
    }
    usual = min((delay for _, delay in both.values()), default=0.0)
    for (a, b), there in quickest.items():
        if (b, a) not in quickest:
            both[a, b] = there - usual, abs(usual) + 1.0
    hosts = _connected(both, reference)
    column = {host: number for number, host in enumerate(sorted(hosts - {reference}))}
    rows, values = [], []
    for (a, b), (ahead, doubt) in both.items():
        if a in hosts and b in hosts:
            weight = 1 / max(doubt, LEAST_DOUBT)
            row = np.zeros(len(column))
            for host, sign in ((a, -weight), (b, weight)):
                if host != reference:
                    row[column[host]] = sign
            rows.append(row)
            values.append(ahead * weight)
    found = {reference: 0.0}
    if column:
        solved = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
        found |= {host: float(solved[number]) for host, number in column.items()}
    return found


def _connected(pairs: Iterable[tuple[str, str]], start: str) -> set[str]:
    pairs = list(pairs)
    found, grows = {start}, True
    while grows:
        more = {host for pair in pairs if found & set(pair) for host in pair} - found
        found |= more
        grows = bool(more)
    return found

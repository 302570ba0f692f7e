"""A finding of the doctor."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """The severity of a finding: a problem keeps jobs from training, a note is worth knowing."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """A line of the doctor's output.

    Attributes:
        topic: What was looked at, a word or two.
        what: What was found, as a sentence without its full stop.
        cure: What to do, sentences; empty where nothing is to be done.
    """

    state: State
    topic: str
    what: str
    cure: str = ""


def ok(topic: str, what: str) -> Finding:
    return Finding(State.OK, topic, what)


def note(topic: str, what: str, cure: str = "") -> Finding:
    return Finding(State.NOTE, topic, what, cure)


def problem(topic: str, what: str, cure: str) -> Finding:
    return Finding(State.PROBLEM, topic, what, cure)

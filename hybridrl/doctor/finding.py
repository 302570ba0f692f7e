"""What a check found."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """A problem keeps jobs from training as they should; a note is worth knowing."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Finding(NamedTuple):
    """One line of what the doctor says.

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
    """All is well."""
    return Finding(State.OK, topic, what)


def note(topic: str, what: str, cure: str = "") -> Finding:
    """Worth knowing."""
    return Finding(State.NOTE, topic, what, cure)


def problem(topic: str, what: str, cure: str) -> Finding:
    """To be mended before a job starts."""
    return Finding(State.PROBLEM, topic, what, cure)

"""A finding of the doctor."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FindingState(StrEnum):
    """The severity of a finding: a problem keeps jobs from training, a note is worth knowing."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class DoctorFinding(NamedTuple):
    """A line of the doctor's output.

    Attributes:
        topic: What was looked at, a word or two.
        what: What was found, as a sentence without its full stop.
        cure: What to do, sentences; empty where nothing is to be done.
    """

    state: FindingState
    topic: str
    what: str
    cure: str = ""


def report_ok(topic: str, what: str) -> DoctorFinding:
    return DoctorFinding(FindingState.OK, topic, what)


def report_note(topic: str, what: str, cure: str = "") -> DoctorFinding:
    return DoctorFinding(FindingState.NOTE, topic, what, cure)


def report_problem(topic: str, what: str, cure: str) -> DoctorFinding:
    return DoctorFinding(FindingState.PROBLEM, topic, what, cure)

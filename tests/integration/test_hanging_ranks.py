"""Whoever keeps the others waiting is named: frozen, in endless code of a user's, in a deadlock."""

from __future__ import annotations

import re

import pytest
from stray_ranks import PRELOAD, go_astray

pytestmark = [pytest.mark.ray]
RANKS, MISSING, LIMIT = 3, 1, 8.0


@pytest.fixture
def meet(ray, tmp_path):
    """Has ranks meet in a way; the error, the words that name the missing one, and what the driver
    was told before."""
    from hybridrl.ray_backend.ray_executor import RayExecutor

    said: list[str] = []

    def meet(way):
        executor = RayExecutor(
            *("cpu", RANKS), cpus_per_host=0.5, timeout_s=LIMIT, heartbeat_s=2.0,
            run_directory=tmp_path, preload=PRELOAD,
        )  # fmt: skip
        (tmp_path / "logs").mkdir()
        executor.notify = said.append
        text, named, _ = go_astray(executor, RANKS, way, MISSING)
        return text, named, said

    return meet


def long(*case):
    return pytest.param(*case, marks=pytest.mark.long)


def more(*case):
    return pytest.param(*case, marks=pytest.mark.more)


@pytest.mark.parametrize(
    ("way", "does", "waiting"),
    [
        ("frozen", "does not answer: it was stopped", "ranks 0 2 wait for it in all_reduce"),
        more("deadlock", r"is in \S+_ranks\.py:\d+ in deadlock", "ranks 0 2 wait for it in all"),
        long("endless", r"is in \S+_ranks\.py:\d+ in endless", "0 2 wait for it in all_reduce"),
        long("messages", r"is in \S+_ranks\.py:\d+ in endless", "rank 2 waits for it in a message"),
        long("left", "has no call in hand", "ranks 0 2 wait for it in all_reduce"),
    ],
)
def test_the_missing_rank_is_named(meet, tmp_path, way, does, waiting):
    text, named, said = meet(way)
    assert re.search(rf"{re.escape(named)}[\d.]+\), which {does}", text), text
    assert waiting in text and ", phase train" in text
    stacks = (tmp_path / "stacks-000001.txt").read_text()
    assert "in all_reduce" in stacks and "stacks-000001.txt" in text
    assert len(said) == (way == "frozen"), said

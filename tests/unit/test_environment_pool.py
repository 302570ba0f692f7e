"""Environment processes: what an episode does costs that episode, and nothing is left behind."""

import contextlib
import math
import os
import sys
import time
from pathlib import Path

import pytest
from scripted_endpoint import ScriptedEndpoint
from tiers import few_of
from victims import environment_of

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest
from hybridrl.errors import ConfigError
from hybridrl.processes import supervised_process
from hybridrl.processes.supervised_process import MARK

FILE = Path(__file__).parents[1] / "environments_that_fail.py"
ENDLESS = {"hang", "swallow"}
PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
assert "answer" not in row and "HYBRIDRL_ROW" not in os.environ
if row["what"] == "report":
    body = json.dumps({"reward": 0.25}).encode()
    url = row["hybridrl"]["reward_url"]
    urllib.request.urlopen(urllib.request.Request(url, body, {"X-Token": row["hybridrl"]["token"]}))
if row["what"] == "number":
    print("thinking")
    print(row["number"] / 2)
if row["what"] == "fail":
    print("no luck", file=sys.stderr)
    sys.exit(4)
if row["what"] == "flood":
    while True:
        print("words" * 1000)
"""


@pytest.fixture(scope="module")
def endpoint():
    endpoint = ScriptedEndpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def pool_of():
    with contextlib.ExitStack() as opened:

        def make(name="play", **settings):
            spec = name if "/" in name or name == "command" else f"{FILE}:{name}"
            pool = EnvironmentPool(EnvironmentConfig(**{"name": spec, "timeout_s": 60} | settings))
            opened.callback(pool.close)
            return pool

        yield make


def plays(endpoint, whats):
    for number, what in enumerate(whats):
        row = {"what": what, "number": number, "answer": "a secret"}
        session = f"s{number}"
        yield EpisodeRequest(
            number, row, endpoint.url(session), endpoint.token, session, False, "reports"
        )


def play(pool, endpoint, whats):
    """What came of one episode each, in their order. Those that never end have little time, and all
    others as much as the pool gives them."""
    usual = pool._config.timeout_s
    for one in plays(endpoint, whats):
        pool._config.timeout_s = min(usual, 0.5 if one.row["what"] in ENDLESS else usual)
        pool.start([one])
    pool._config.timeout_s = usual
    found, until = {}, time.monotonic() + 60
    while len(found) < len(whats) and time.monotonic() < until:
        for played in pool.poll(1.0):
            assert played.key not in found
            found[played.key] = played
    return [found[number] for number in range(len(whats))]


def descendants():
    """Processes that have the mark of a pool."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={os.getpid()}-".encode() in environment_of(int(folder.name)):
                found.append(int(folder.name))
    return found


def test_failures_cost_their_own_episodes(endpoint, pool_of):
    whats = ["good", "raise", "exit", "nonsense", "hang", "swallow", "good"]
    found = play(pool_of(options={"scale": 2.0}), endpoint, whats)
    assert [one.kind for one in found] == ["ok", *["error"] * 3, *["timeout"] * 2, "ok"]
    assert found[6].reward == 12.0 and found[6].metrics == {"length": 2.0}
    assert all(math.isnan(one.reward) for one in found[1:6])
    assert "ValueError: no such move" in found[1].failure and "shim.py" not in found[1].failure
    assert "environment.timeout_s" in found[4].failure


def test_time_is_limited_after_the_only_episode_was_late(endpoint, pool_of):
    pool = pool_of(processes=1)
    for _ in range(2):
        (late,) = play(pool, endpoint, ["hang"])
        assert late.kind == "timeout"


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    few_of(
        [
            ("die", "crash", "ended with exit status 7"),
            ("segfault", "crash", "SIGSEGV"),
            ("child exits", "crash", "exit status 3"),
            ("eat", "memory", "environment.memory_gib"),
            ("block", "timeout", "one step of the episode took longer"),
            ("flood", "output", "lots of words"),
        ],
        3,
        several=True,
    ),
)
def test_a_lost_process_costs_who_lost_it(endpoint, pool_of, what, kind, said):
    """The others are played again, in sessions of their own."""
    timeout_s = 4.0 if what == "block" else 60.0
    pool = pool_of(timeout_s=timeout_s, memory_gib=0.4)
    found = play(pool, endpoint, ["bystander", what, "bystander"])
    assert [one.kind for one in found] == ["ok", kind, "ok"]
    assert said in found[1].failure
    assert found[2].sessions == {"s2.again1": 2.0}


def test_memory_is_bounded_without_control_groups(endpoint, pool_of, monkeypatch):
    monkeypatch.setattr(supervised_process, "make_memory_cgroup", lambda limit: None)
    found = play(pool_of(memory_gib=0.4), endpoint, ["eat", "good"])
    assert [one.kind for one in found] == ["memory", "ok"]


def test_plain_functions_get_threads(endpoint, pool_of):
    whats = ["good", "die", "good", "hang", "good"]
    found = play(pool_of("play_plainly"), endpoint, whats)
    assert [one.kind for one in found] == ["ok", "crash", "ok", "timeout", "ok"]
    assert found[4].turn_rewards == [0.5]


def test_programs_are_run_as_they_are(endpoint, pool_of):
    pool = pool_of("command", options={"command": [sys.executable, "-c", PROGRAM]})
    found = play(pool, endpoint, ["number", "quiet", "fail", "flood", "number"])
    assert [one.kind for one in found] == ["ok", "ok", "error", "output", "ok"]
    assert found[0].reward == 0.0 and found[4].reward == 2.0
    assert math.isnan(found[1].reward), "it said nothing, which the endpoint may know better"
    assert "exit status 4" in found[2].failure and "no luck" in found[2].failure
    pool = pool_of("command", options={"command": [sys.executable, "-c", PROGRAM], "report": True})
    found = play(pool, endpoint, ["report", "number"])
    assert [one.kind for one in found] == ["ok", "ok"]
    assert all(math.isnan(one.reward) for one in found), "what it prints does not count"
    assert endpoint.rewards == {"s0": 0.25}  # which its caller takes


def test_nothing_is_left_behind(endpoint, pool_of):
    pool = pool_of(processes=2)
    pool.start(list(plays(endpoint, ["leave behind", "hang", "block", "good"])))
    while len(descendants()) < 3:
        pool.poll(0.1)
    pool.close()
    until = time.monotonic() + 60  # the kernel ends those that it has killed when they get a core
    while descendants() and time.monotonic() < until:
        time.sleep(0.01)
    assert not descendants()


def test_a_pool_that_forgets_goes_on(endpoint, pool_of):
    pool = pool_of()
    pool.start(list(plays(endpoint, ["hang", "good"])))
    pool.poll(30.0)
    pool.cancel()
    found = play(pool, endpoint, ["good", "good"])
    assert [one.reward for one in found] == [0.0, 1.0]
    assert pool.poll(0.0) == []
    pool.start([])


def test_what_cannot_be_played_is_refused(pool_of, tmp_path):
    for settings, said in [
        ({"name": "verifier"}, "verifiers"),
        ({"name": f"{FILE}:plays"}, "Did you mean `play`"),
        ({"name": f"{FILE}:play", "python": "no/such/python"}, "no/such/python"),
    ]:
        with pytest.raises(ConfigError, match=said):
            EnvironmentPool(EnvironmentConfig(**settings))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        pool_of(options={"size": 1}).load()
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos.write(2, b'out of order')\nos._exit(5)\ndef play(): ...\n")
    with pytest.raises(ConfigError, match=r"exit status 5 while it loaded[^$]*out of order"):
        pool_of(f"{broken}:play").load()

"""Nothing that a reward function or an environment starts outlives their pool, however that ends
and however it hides."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import few_of

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path

SLEEP = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"

def leave(folder):
    code = f"import sys; sys.argv[1:] = [{folder!r} + '/double']; {SLEEP}"
    if os.fork() == 0:  # forks twice, and is in a session of its own in between
        os.setsid()
        if os.fork() == 0:
            exec(code, {})
        os._exit(0)
    os.wait()
    run = ["env", "-i", "setsid", sys.executable, "-c", SLEEP, folder + "/empty"]
    subprocess.Popen(run)  # has no variable to be known by
    subprocess.Popen([sys.executable, "-c", SLEEP, folder + "/child"])
    while len([one for one in Path(folder).iterdir() if one.read_text()]) < 3:
        time.sleep(0.01)

def score(prompt, response, answer):
    if prompt != "quiet":
        leave(response)
    if prompt == "hold":  # the interpreter's lock, so that no thread of this process runs
        while True:
            sum(range(10**9))
    return 1.0

async def play(row, model):
    leave(row["folder"])
    return 1.0
"""
OWNER = """
import sys
from hybridrl.config.schema import EnvironmentConfig
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest
from hybridrl.rewards.reward_pool import RewardPool
with RewardPool(["{folder}/leaves.py:score"]) as rewards:
    rewards.score([dict(prompt="", response="{folder}/reward", answer="")])
    pool = EnvironmentPool(EnvironmentConfig("{folder}/leaves.py:play"))
    play = EpisodeRequest(0, dict(folder="{folder}/environment"), "http://127.0.0.1:9/session/e/v1", "", "e", False)
    pool.start([play])
    (played,) = pool.poll(100.0)
    assert played.reward == 1.0, played
    print("played", flush=True)
    if "{end}" == "error":
        raise RuntimeError("an error")
    if "{end}" == "kill":
        sys.stdin.read()
    pool.close()
"""  # noqa: E501


@pytest.fixture
def folder(tmp_path):
    for name in ("reward", "environment"):
        (tmp_path / name).mkdir()
    (tmp_path / "leaves.py").write_text(PROGRAM)
    return tmp_path


def left_in(*folders):
    pids = [int(file.read_text()) for folder in folders for file in folder.iterdir()]
    assert len(pids) == 3 * len(folders)
    for _ in range(1000):  # those of a killed job are ended after it
        left = [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]
        if not any(map(is_alive, left)):
            return []
        time.sleep(0.02)
    return left


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", few_of(["success", "error", "kill"], ["kill"]))
def test_daemons_end_with_the_job(folder, end):
    code = OWNER.format(folder=folder, end=end)
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"played\n"
        if end == "kill":
            owner.kill()
    assert owner.returncode == {"success": 0, "error": 1, "kill": -signal.SIGKILL}[end]
    assert left_in(folder / "reward", folder / "environment") == []


@pytest.mark.more
def test_a_function_that_holds_the_interpreter_is_stopped_with_what_it_started(folder):
    from hybridrl.rewards.reward_pool import RewardPool

    spec = f"{folder}/leaves.py:score"
    rows = [{"prompt": "hold", "response": str(folder / "reward"), "answer": ""}]
    rows += [{"prompt": "quiet", "response": "", "answer": ""}]
    with RewardPool([spec], timeout_s=6.0, on_error="value", error_value=-1.0) as pool:
        result = pool.score(rows)
        assert result.scores == [-1.0, 1.0] and result.timeouts == 1
        assert left_in(folder / "reward") == []


def test_a_killed_launcher_is_no_way_out(folder):
    """What it would have found is found by a variable that processes inherit."""
    from hybridrl.rewards.reward_pool import RewardPool

    with RewardPool([f"{folder}/leaves.py:score"]) as pool:
        pool.score([{"prompt": "", "response": str(folder / "reward"), "answer": ""}])
        unknown = folder / "reward" / "empty"  # that one has no variable
        unknown_pid = int(unknown.read_text())
        unknown.unlink()
        (launcher,) = children(os.getpid())
        leaves = {int(file.read_text()) for file in (folder / "reward").iterdir()}
        ended = {launcher, *children(launcher)} - leaves
        os.kill(launcher, signal.SIGKILL)
        while any(map(is_alive, ended)):  # until then, its process may answer a row
            time.sleep(0.01)
        (folder / "reward" / "third").write_text(str(launcher))
        assert pool.score([{"prompt": "quiet", "response": "", "answer": ""}]).scores == [1.0]
        assert left_in(folder / "reward") == []
    os.kill(unknown_pid, signal.SIGKILL)


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

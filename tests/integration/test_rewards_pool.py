import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import few_of

from hybridrl.errors import ConfigError, RewardError, UnsupportedMachineError
from hybridrl.rewards.reward_pool import RewardPool

TIMEOUT_S, PATIENCE_S = 4.0, 60.0
"""For rounds in which a row hangs, which others must not do on a busy machine; and for others."""

# What `score` does with a row is told by its response.
FUNCTIONS = """
import asyncio, ctypes, functools, os, sys, time

def score(prompt, response, answer, **row):
    if response == "raise":
        raise ValueError("bad response")
    if response == "exit":
        sys.exit(5)
    if response == "die":
        os._exit(7)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "hang":
        time.sleep(100)
    if response == "print":
        print("loud", flush=True)
        os.write(1, b"louder")
        os.system("echo loudest")
        input_seen = sys.stdin.read()
        return float(len(input_seen))
    if response == "dict":
        return {"score": 2, "length": 7, "note": "text", "nested": {}}
    if response == "pid":
        return os.getpid()
    return eval(response)

async def score_async(response, **row):
    if response == "block":
        time.sleep(100)
    if response == "hang":
        await asyncio.sleep(100)
    if response == "own":
        raise TimeoutError("mine")
    return score("", response, "")

waiting = []

async def all_together(count, **row):
    gate = asyncio.Event()
    waiting.append(gate)
    if len(waiting) == count:
        for other in waiting:
            other.set()
    await gate.wait()
    return 1.0

def narrow(response, level):
    return level

def tuned(response, *, factor, words=(), **row):
    return factor * len(words)

def forgetful(response, **row):
    return score_async(response)

class Judge:
    async def __call__(self, response, **row):
        return 3.0

judge = Judge()
partly = functools.partial(score_async, level=2)
"""


@pytest.fixture(scope="module")
def functions_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def make_pool(functions_file):
    with contextlib.ExitStack() as pools:

        def make(*names, **settings):
            settings = {"timeout_s": PATIENCE_S, "on_error": "drop"} | settings
            functions = [f"{functions_file}:{name}" for name in names]
            return pools.enter_context(RewardPool(functions, **settings))

        yield make


def rows(*responses, **further):
    return [{"prompt": "p", "response": r, "answer": "a", **further} for r in responses]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid):
    for _ in range(3000):
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("name", few_of(["score", "score_async", "partly"], ["score"]))
def test_scores_come_back_in_order(make_pool, name, processes):
    pool = make_pool(name, processes=processes)
    for _ in range(2):
        result = pool.score(rows(*map(str, range(300))))
        assert result.scores == list(range(300))
        assert result.columns == {f"reward/{name}": result.scores}
        assert (result.failures, result.timeouts, result.first_failure) == (0, 0, None)


def test_no_rows(make_pool):
    assert make_pool("score").score([]).scores == []


def test_dictionaries_bring_further_columns(make_pool):
    result = make_pool("score").score(rows("1", "dict"))
    assert result.scores == [1.0, 2.0]
    assert list(result.columns) == ["reward/score", "reward/score/length"]
    assert math.isnan(result.columns["reward/score/length"][0])
    assert result.columns["reward/score/length"][1] == 7.0


def test_weighted_sum_of_several_functions(make_pool):
    pool = make_pool("score", "narrow", "score_async", "judge", weights=[1, 10, 0.5, 0])
    result = pool.score(rows("2", "4", level=3))
    assert result.scores == [33.0, 36.0]
    assert {name: column[0] for name, column in result.columns.items()} == {
        "reward/score": 2.0,
        "reward/narrow": 3.0,
        "reward/score_async": 2.0,
        "reward/judge": 3.0,
    }


BAD_ROWS = [
    ("raise", "ValueError: bad response"),
    ("exit", "SystemExit: 5"),
    ("die", "ended with exit status 7"),
    ("segfault", "killed by SIGSEGV"),
    ("hang", "longer than `reward.timeout_s`"),
    ("float('nan')", "nan, and a score must be a finite number"),
    ("float('inf')", "inf, and a score must be a finite number"),
    ("'high'", "'high' (str), which is no number"),
    ("None", "None (NoneType), which is no number"),
    ("[1.0, 2.0]", "[1.0, 2.0] (list), which is no number"),
    ("{'reward': 1}", "without the key 'score'; its keys are: 'reward'"),
    ("{'score': 'x'}", "a dictionary whose 'score' is 'x' (str)"),
    ("{'score': 1, 'std': 2}", "a dictionary with the key 'std'"),
]
# The kinds of functions share what judges a score.
CASES = [(name, *case) for case in BAD_ROWS for name in ("score", "score_async", "partly")]
MAIN = [case for case in CASES if case[0] == "score" or case[1] in ("raise", "hang")]


@pytest.mark.parametrize(("name", "response", "explanation"), few_of(CASES, MAIN, several=True))
def test_one_bad_row_costs_one_row(make_pool, name, response, explanation):
    if name == "score_async" and response in ("die", "segfault"):
        pytest.skip("has a test of its own")
    patience = TIMEOUT_S if response == "hang" else PATIENCE_S
    result = make_pool(name, timeout_s=patience).score(rows("1", "2", response, "4", "5"))
    assert [s for s in result.scores if not math.isnan(s)] == [1.0, 2.0, 4.0, 5.0]
    assert math.isnan(result.scores[2])
    assert result.failures == 1
    assert result.timeouts == (response == "hang")
    assert explanation in result.first_failure
    assert "row 3 of 5" in result.first_failure


@pytest.mark.parametrize("response", ["die", "block"])
def test_the_guilty_one_of_concurrent_rows_is_found(make_pool, response):
    patience = TIMEOUT_S if response == "block" else PATIENCE_S
    pool = make_pool("score_async", timeout_s=patience)
    result = pool.score(rows("1", "2", response, "4"))
    assert result.failures == 1
    assert math.isnan(result.scores[2])
    assert [s for s in result.scores if not math.isnan(s)] == [1.0, 2.0, 4.0]


@pytest.mark.more
def test_many_bad_rows_and_several_processes(make_pool):
    pool = make_pool("score", processes=2, timeout_s=TIMEOUT_S)
    responses = ["die", "hang", "raise", *map(str, range(50)), "hang", "segfault"]
    result = pool.score(rows(*responses))
    assert (result.failures, result.timeouts) == (5, 2)
    assert result.scores[3:53] == list(range(50))
    assert pool.score(rows("1")).scores == [1.0]


def test_a_failing_function_spares_the_others(make_pool):
    result = make_pool("score", "narrow").score(rows("die", "2", level=3))
    assert math.isnan(result.scores[0])
    assert result.columns["reward/narrow"] == [3.0, 3.0]


BAD = ["raise", "die", "hang", "float('nan')", "'high'", "[1.0, 2.0]"]


def test_a_value_can_stand_for_any_failure(make_pool):
    settings = {"on_error": "value", "error_value": -1.0, "timeout_s": TIMEOUT_S}
    pool = make_pool("score", "narrow", **settings)
    result = pool.score(rows(*BAD, "2", level=3))
    assert result.scores == [2.0] * len(BAD) + [5.0]
    assert result.columns["reward/score"] == [-1.0] * len(BAD) + [2.0]
    assert (result.failures, result.timeouts) == (len(BAD), 1)


def test_any_failure_can_end_the_round(make_pool):
    pool = make_pool("score", on_error="fail", timeout_s=TIMEOUT_S)
    for response in BAD:
        with pytest.raises(RewardError, match=r"(?s)`score` failed on row 2 of 2.*on_error"):
            pool.score(rows("1", response))
    assert pool.score(rows("1")).scores == [1.0]


def test_every_function_that_fails_is_counted(make_pool):
    result = make_pool("score", "narrow").score(rows("raise", "2"))
    assert result.failures == 3  # `narrow` misses its `level` in both rows
    assert all(map(math.isnan, result.scores))


def test_on_error_fail_tells_everything_and_the_pool_lives_on(make_pool):
    pool = make_pool("score", on_error="fail", processes=2, timeout_s=TIMEOUT_S)
    with pytest.raises(RewardError) as caught:
        pool.score(rows("1", "hang", *["raise"] * 20))
    message = str(caught.value)
    for part in ("`score`", "of 22", "prompt: 'p'", "Traceback", "reward.on_error"):
        assert part in message
    assert "child.py" not in message
    assert pool.score(rows("1", "2")).scores == [1.0, 2.0]


def test_prints_do_not_disturb(make_pool, capfd):
    result = make_pool("score").score(rows("print", "1"))
    assert result.scores == [0.0, 1.0]
    written = capfd.readouterr()
    assert written.out == ""
    assert "loud\n" in written.err
    assert "louder" in written.err
    assert "loudest" in written.err


def test_asynchronous_rows_run_concurrently(make_pool):
    result = make_pool("all_together").score(rows(*["x"] * 40, count=40))
    assert result.scores == [1.0] * 40


def test_a_timeout_error_of_the_function_is_no_time_out(make_pool):
    result = make_pool("score_async").score(rows("own"))
    assert (result.failures, result.timeouts) == (1, 0)
    assert "TimeoutError: mine" in result.first_failure


def test_a_coroutine_without_async_def_is_explained(make_pool):
    assert "must be declared `async def`" in make_pool("forgetful").score(rows("1")).first_failure


@pytest.mark.more
def test_large_rows_and_slow_readers(make_pool):
    result = make_pool("score").score(rows("len(prompt)", *["1"] * 5) * 10)
    assert result.failures == 0
    big = [{"prompt": "x" * 3_000_000, "response": "len(prompt)", "answer": ""} for _ in range(6)]
    assert make_pool("score").score(big).scores == [3e6] * 6


def test_closing_kills_the_processes(make_pool):
    pool = make_pool("score", processes=2)
    pids = {int(pid) for pid in pool.score(rows(*["pid"] * 200)).scores}
    assert all(map(is_alive, pids))
    pool.close()
    assert not any(map(is_alive, pids))
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.score(rows("1"))


def test_a_forgotten_pool_leaves_no_process(functions_file):
    pool = RewardPool([f"{functions_file}:score"])
    pid = int(pool.score(rows("pid")).scores[0])
    del pool
    assert wait_until_dead(pid)


def test_an_idle_process_that_died_is_replaced(make_pool):
    pool = make_pool("score")
    pid = int(pool.score(rows("pid")).scores[0])
    os.kill(pid, signal.SIGKILL)
    assert wait_until_dead(pid)
    result = pool.score(rows("1", "2"))
    assert result.scores == [1.0, 2.0]
    assert result.failures == 0


def test_a_row_whose_process_is_killed_is_tried_once_more(make_pool, tmp_path):
    kill, mark = "os.kill(os.getpid(), 9)", f"'{tmp_path}/killed'"
    once = f"2.0 if os.path.exists({mark}) else (os.mkdir({mark}), {kill})"
    result = make_pool("score").score(rows("1", once, kill, "4"))
    assert [s for s in result.scores if not math.isnan(s)] == [1.0, 2.0, 4.0]
    assert result.failures == 1 and "killed by SIGKILL" in result.first_failure


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize("response", ["1", "hang"])
def test_processes_die_with_a_killed_parent(functions_file, response):
    code = f"""
import sys
from hybridrl.rewards.reward_pool import RewardPool
pool = RewardPool(["{functions_file}:score"])
row = lambda response: [dict(prompt="", response=response, answer="")]
sys.stdout.write(str(int(pool.score(row("pid")).scores[0])) + chr(10))
sys.stdout.flush()
pool.score(row("{response}"))
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert wait_until_dead(pid)


def test_ctrl_c_is_for_the_parent(make_pool):
    pool = make_pool("score")
    pid = int(pool.score(rows("pid")).scores[0])
    os.kill(pid, signal.SIGINT)
    assert pool.score(rows("pid")).scores == [pid]


def test_import_errors_come_with_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("import absent_module\ndef score(**row): ...\n")
    pool = RewardPool([f"{tmp_path}/broken.py:score"])
    with pytest.raises(ConfigError, match=r"(?s)broken.py:score.*No module named 'absent_module'"):
        pool.start()
    (tmp_path / "dying.py").write_text("import os\nos._exit(9)\ndef score(**row): ...\n")
    pool = RewardPool([f"{tmp_path}/dying.py:score"])
    with pytest.raises(RewardError, match="exit status 9 while it imported"):
        pool.start()


def test_options_reach_their_functions(make_pool):
    options = {"narrow": {"level": 7}, "tuned": {"factor": 3, "words": ["a", "b"]}}
    pool = make_pool("narrow", "tuned", "score", options=options)
    result = pool.score(rows("1", level=3))  # an option wins over a column of the data
    assert {name: column[0] for name, column in result.columns.items()} == {
        "reward/narrow": 7.0,
        "reward/tuned": 6.0,
        "reward/score": 1.0,
    }


def test_options_of_builtin_functions():
    options = {"length": {"limit": 2, "ramp": 4}, "format": {"pattern": "<.*>"}}
    with RewardPool(["length", "format"], options=options) as pool:
        assert pool.score(rows("<b>", "c")).columns == {
            "reward/length": [-0.25, 0.0],
            "reward/format": [1.0, 0.0],
        }


def test_an_option_that_the_function_does_not_take_is_refused(make_pool):
    with pytest.raises(ConfigError, match=r"no parameter `factr`.*Did you mean `factor`"):
        make_pool("tuned", options={"tuned": {"factr": 3}})


def test_start_waits_for_every_process(make_pool):
    pool = make_pool("score", processes=2)
    pool.start()
    assert pool.score(rows("1")).scores == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": []}, "`reward.function` is empty"),
        ({"functions": ["exactly"]}, "Did you mean `exact`"),
        ({"options": {"exac": {}}}, "`reward.options.exac` .* names no `exac`.*mean `exact`"),
        ({"options": {"exact": 3}}, "`reward.options.exact` is 3, expected a keyword argument"),
        ({"options": {"exact": {"answer": "x"}}}, "has no parameter `answer`"),
        ({"functions": ["format"]}, "`format` needs .*reward.options.format.pattern=<value>"),
        ({"functions": ["format"], "options": {"format": {"patern": "x"}}},
         "no parameter `patern` .*Did you mean `pattern`"),
        ({"weights": [1, 2]}, "`reward.weights` has 2 entries"),
        ({"weights": [math.nan]}, "`reward.weights`.*finite"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardPool(**({"functions": ["exact"]} | settings))


# What a module of reward functions says before they start.

CHECKED = """
from hybridrl.errors import ConfigError, UnsupportedMachineError

def check_reward(options, timeout_s):
    if options.get("width", 1) < 0:
        raise ConfigError("width is negative")
    if options.get("width") == 7:
        raise UnsupportedMachineError("this machine is too narrow")
    if options.get("width") == 8:
        raise KeyError("eight")
    return f"width {options.get('width', 1)} within {timeout_s:g} s"

def score(response, width=1, **row):
    if response == "narrow":
        raise UnsupportedMachineError("this machine is too narrow")
    return 1.0

async def score_async(response, **row):
    return score(response)
"""


@pytest.fixture
def checked(tmp_path):
    (tmp_path / "checked.py").write_text(CHECKED)
    return f"{tmp_path / 'checked.py'}:"


def test_functions_are_checked_before_they_start(checked):
    settings = {"options": {"score": {"width": 3}}, "timeout_s": 4.0, "processes": 2}
    with RewardPool([checked + "score"], **settings) as pool:
        pool.start()
        assert pool.remarks == ["width 3 within 4 s"]


@pytest.mark.parametrize("on_error", ["fail", "drop", "value"])
def test_what_does_not_work_here_is_refused_whatever_on_error_is(checked, on_error):
    for width, error, words in (
        (-1, ConfigError, "width is negative"),
        (7, UnsupportedMachineError, "too narrow"),
        (8, RewardError, "(?s)`check_reward` of .*KeyError: 'eight'"),
    ):
        options = {"score": {"width": width}}
        pool = RewardPool([checked + "score"], options=options, on_error=on_error)
        with pool, pytest.raises(error, match=words):
            pool.start()
    for name in ("score", "score_async"):
        with RewardPool([checked + name], on_error=on_error) as pool:
            assert pool.score([{"response": "wide"}]).scores == [1.0]
            with pytest.raises(UnsupportedMachineError, match="too narrow"):
                pool.score([{"response": "wide"}, {"response": "narrow"}])


def test_limits_of_programs_are_options_that_are_checked():
    function = "hybridrl.rewards.code:passes_tests"
    for options, words in (
        ({"cpu_s": 0}, "passes_tests.cpu_s=0: must be a whole number greater than 0"),
        ({"memory_mib": "much"}, "passes_tests.memory_mib=much: must be a whole number"),
        ({"total_s": 40.0}, "Set reward.timeout_s=60"),
    ):
        pool = RewardPool([function], options={"passes_tests": options}, on_error="value")
        with pool, pytest.raises(ConfigError, match=words):
            pool.start()
    with pytest.raises(ConfigError, match=r"no parameter `cpu`.* Did you mean `cpu_s`"):
        RewardPool([function], options={"passes_tests": {"cpu": 3}})
    with RewardPool([function], options={"passes_tests": {"cpu_s": 3}}) as pool:
        pool.start()
        assert pool.remarks[0].startswith("programs run confined by ")

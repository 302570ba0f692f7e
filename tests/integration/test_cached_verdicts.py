"""Scores of reward functions from the cache: equal calls run once, changed code runs anew, and
nothing that was not the same for sure is reused."""

import pytest

from hybridrl.config.schema import CacheConfig
from hybridrl.errors import RewardError
from hybridrl.rewards import code
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.rewards.transient_score import TransientScore
from hybridrl.sandbox.python_runner import SandboxConfinement, Verdict
from hybridrl.system.content_cache import ContentCache

FUNCTIONS = """
import os
import sys
import types
from pathlib import Path
import neighbour
from hybridrl.rewards.transient_score import TransientScore

LOG = Path(__file__).parent / "calls.txt"

def called(response):
    with LOG.open("a") as log:
        log.write(response + "\\n")

def plain(response, **row):
    called(response)
    return float(len(response))

def cached(response, answer, scale=1.0):
    called(response)
    return {"score": scale * len(response) * neighbour.FACTOR, "half": len(response) / 2}
cached.cache = True

def by_first(response, **row):
    called(response)
    return float(len(response))
by_first.cache = lambda response, **row: response[:1]

def transient(response, **row):
    called(response)
    return TransientScore(score=float(len(response)))
transient.cache = True

def failing(response, **row):
    called(response)
    raise ValueError("no")
failing.cache = True

def keyless(response, **row):
    called(response)
    return 1.0
keyless.cache = lambda **row: object()

def unkeyed(response, **row):
    called(response)
    return 1.0
unkeyed.cache = lambda **row: 1 / 0

def late(response, **row):
    called(response)
    import lazy
    return lazy.FACTOR * len(response)
late.cache = True

def greedy(response, tests, **row):
    called(response)
    while tests:
        tests.pop()
    return 1.0
greedy.cache = True

def lossy(response, **row):
    called(response)
    return float(len(response))
def lose_process(response, **row):
    try:
        (Path(__file__).parent / "lost").touch(exist_ok=False)
    except FileExistsError:
        return response
    os._exit(1)
lossy.cache = lose_process

sys.modules["odd"] = types.ModuleType("odd")
sys.modules["odd"].__file__ = "_odd.py"  # as that of `torch.ops`, which is no file

def group(prompt, responses):
    called(" ".join(responses))
    return [float(len(one)) for one in responses]
group.cache = True

def steps(response, **row):
    called(response)
    return {"score": 0.5, "steps": [(1, 0.25), (2, 0.125)]}
steps.cache = True
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "neighbour.py").write_text("FACTOR = 1.0\n")
    return tmp_path


def score(folder, name, *responses, groups=None, processes=1, **options):
    """The scores, and which rows the function was called for."""
    (folder / "calls.txt").write_text("")
    cache = ContentCache(CacheConfig(folder=str(folder / "cache")), "verdicts")
    further = {key: options.pop(key) for key in ("options",) if key in options}
    given = {"prompt": "p", "answer": "a", **options}
    with RewardPool(
        [f"{folder}/mine.py:{name}"],
        on_error="value",
        error_value=-1.0,
        processes=processes,
        cache=cache,
        **further,
    ) as pool:
        found = pool.score([{**given, "response": one} for one in responses], groups=groups)
    calls = sorted((folder / "calls.txt").read_text().split("\n")[:-1])
    return found, calls, (cache.asked, cache.hits)


def test_functions_that_do_not_ask_for_it_are_called_each_time(folder):
    for _ in range(2):
        found, calls, counts = score(folder, "plain", "a", "a", "bb")
        assert (found.scores, calls, counts) == ([1.0, 1.0, 2.0], ["a", "a", "bb"], (0, 0))


def test_equal_rows_are_scored_once_and_then_never(folder):
    found, calls, counts = score(folder, "cached", "a", "bb", "a", "a", "bb", processes=2)
    assert (calls, counts) == (["a", "bb"], (5, 3))
    again, calls, counts = score(folder, "cached", "bb", "a", "ccc")
    assert found.scores == [1.0, 2.0, 1.0, 1.0, 2.0] and again.scores == [2.0, 1.0, 3.0]
    assert found.columns["reward/cached/half"] == [0.5, 1.0, 0.5, 0.5, 1.0]
    assert again.columns["reward/cached/half"] == [1.0, 0.5, 1.5]
    assert (calls, counts) == (["ccc"], (3, 2))


def test_a_function_may_say_what_counts(folder):
    found, calls, _ = score(folder, "by_first", "a", "ab", "b", other=1)
    assert (found.scores, calls) == ([1.0, 1.0, 1.0], ["a", "b"])
    assert score(folder, "by_first", "a", other=2)[1] == []


def change_function(folder):
    (folder / "mine.py").write_text(FUNCTIONS.replace("scale * len", "2 * scale * len"))
    return {}, 2.0


def change_neighbour(folder):
    # of another size: Python takes bytecode for current by the file's size and second
    (folder / "neighbour.py").write_text("FACTOR = 1.0 + 2.0\n")
    return {}, 3.0


CHANGES = {
    "its source": change_function,
    "the source of what it imports": change_neighbour,
    "an option": lambda folder: ({"options": {"cached": {"scale": 4.0}}}, 4.0),
    "a column that it reads": lambda folder: ({"answer": "b"}, 1.0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_scored_anew(folder, what):
    score(folder, "cached", "a")
    settings, expected = CHANGES[what](folder)
    found, calls, _ = score(folder, "cached", "a", **settings)
    assert (found.scores, calls) == ([expected], ["a"])


def test_a_column_that_it_does_not_read_changes_nothing(folder):
    score(folder, "cached", "a", number=1)
    assert score(folder, "cached", "a", number=2)[1] == []


@pytest.mark.parametrize("name", ["transient", "failing", "keyless"])
def test_what_another_call_might_not_return_is_not_cached(folder, name):
    expected = {"transient": 1.0, "failing": -1.0}.get(name, 1.0)
    for _ in range(2):
        found, calls, (_, hits) = score(folder, name, "a", "a")
        assert (found.scores, calls, hits) == ([expected] * 2, ["a", "a"], 0)


def test_a_module_that_is_imported_when_it_is_called_counts(folder):
    """On the first call nobody knows of it yet."""
    for factor in (1.0, 22.0):  # of different sizes, as `change_neighbour` explains
        (folder / "lazy.py").write_text(f"FACTOR = {factor}\n")
        for count in (1, 2):
            found, calls, _ = score(folder, "late", "a" * count)
            assert found.scores == [factor * count] and calls == ["a" * count]
        assert score_twice(folder, "b", "aa") == ([factor, 2 * factor], ["b"])


def score_twice(folder, *responses):
    """The scores of calls of `late` one after the other in one process, and which were made."""
    cache = ContentCache(CacheConfig(folder=str(folder / "cache")), "verdicts")
    (folder / "calls.txt").write_text("")
    with RewardPool([f"{folder}/mine.py:late"], cache=cache) as pool:
        rows = [{"prompt": "p", "answer": "a", "response": one} for one in responses]
        scores = [pool.score([row]).scores[0] for row in rows]
    return scores, (folder / "calls.txt").read_text().split()


def test_arguments_that_it_changes_are_those_that_it_got(folder):
    score(folder, "greedy", "a", tests=["1", "2"])
    assert score(folder, "greedy", "a", tests=[])[1] == ["a"]
    assert score(folder, "greedy", "a", tests=["1", "2"])[1] == []


def test_a_source_that_changes_while_it_is_loaded_is_not_known(folder):
    cache = ContentCache(CacheConfig(folder=str(folder / "cache")), "verdicts")
    row = {"prompt": "p", "answer": "a", "response": "a"}
    with RewardPool([f"{folder}/mine.py:cached"], cache=cache) as pool:
        pool.start()
        change_function(folder)
        assert pool.score([row]).scores == [1.0]
    found, calls, _ = score(folder, "cached", "a")
    assert (found.scores, calls) == ([2.0], ["a"])


def test_a_process_that_is_lost_with_the_keys_costs_only_them(folder):
    found, calls, _ = score(folder, "lossy", "a", "bb")
    assert (found.scores, calls) == ([1.0, 2.0], ["a", "bb"])
    assert (folder / "lost").exists()


def test_a_key_that_cannot_be_computed_is_told(folder):
    with pytest.raises(RewardError, match=r"(?s)attribute `cache`.*ZeroDivisionError"):
        score(folder, "unkeyed", "a")


def test_functions_of_groups_and_steps(folder):
    for calls in (["aa b"], []):
        found = score(folder, "group", "aa", "b", groups=[0, 0])
        assert (found[0].scores, found[1]) == ([2.0, 1.0], calls)
    assert score(folder, "group", "b", "aa", groups=[0, 0])[1] == ["b aa"]
    for calls in (["xyz"], []):
        found = score(folder, "steps", "xyz")
        assert (found[0].steps, found[1]) == ([[(1, 0.25), (2, 0.125)]], calls)
        assert (found[0].scores, found[0].outcomes) == ([0.875], [0.5])


def test_no_rows(folder):
    found, calls, counts = score(folder, "cached")
    assert (found.scores, calls, counts) == ([], [], (0, 0))


TESTS = ["assert f(2) == 4", "assert f(3) == 9"]
RIGHT = "```python\ndef f(x):\n    return x * x\n```"
SLOW = "```python\ndef f(x):\n    while True:\n        pass\n```"


def judge(tmp_path, *responses, tests=TESTS, **options):
    cache = ContentCache(CacheConfig(folder=str(tmp_path)), "verdicts")
    with RewardPool(
        ["hybridrl.rewards.code:passes_tests"], options={"passes_tests": options}, cache=cache
    ) as pool:
        rows = [{"prompt": "p", "response": one, "tests": tests, "id": n} for n, one in
                enumerate(responses)]  # fmt: skip
        return pool.score(rows).scores, cache.hits


def test_a_program_is_judged_once_whatever_is_said_around_it(tmp_path):
    said = [RIGHT, f"Squares:\n{RIGHT}", f"{RIGHT}\nDone."]
    assert judge(tmp_path, *said) == ([1.0, 1.0, 1.0], 2)
    assert judge(tmp_path, said[1], RIGHT.replace("x * x", "x + x")) == ([1.0, 0.5], 1)
    assert judge(tmp_path, RIGHT, tests=["assert f(1) == 2"]) == ([0.0], 0)
    assert judge(tmp_path, RIGHT, memory_mib=512) == ([1.0], 0)
    assert judge(tmp_path, RIGHT, tests=[{"input": "", "output": "4"}]) == ([0.0], 0)


@pytest.mark.more
def test_programs_that_a_signal_ends_are_judged_each_time(tmp_path):
    """The system may have sent it, for want of memory."""
    killed = "```python\nimport os\ndef f(x):\n    os.abort()\n```"
    at_once = "```python\nimport os\nos.abort()\n```"
    after_its_pipes = killed.replace(
        "os.abort()", "os.closerange(3, 64); __import__('time').sleep(0.3); os.abort()"
    )
    wrong = "```python\n1 / 0\n```"
    for hits in (0, 1):
        assert judge(tmp_path, killed, at_once, after_its_pipes) == ([0.0, 0.0, 0.0], 0)
        assert judge(tmp_path, at_once, tests=[{"input": "", "output": "4"}]) == ([0.0], 0)
        assert judge(tmp_path, wrong) == ([0.0], hits)


def test_without_namespaces_only_what_passes_is_kept(monkeypatch):
    alone = SandboxConfinement("none", 1)
    monkeypatch.setattr(code, "find_confinement", lambda: alone)
    for passed, transient in (([True, True], False), ([True, False], True)):
        verdict = Verdict(passed, ["", ""], [False, False], is_repeatable=True)
        monkeypatch.setattr(code, "judge_program", lambda *_, found=verdict: found)
        found = code.passes_tests("p", RIGHT, TESTS)
        assert isinstance(found, TransientScore) == transient


@pytest.mark.more
def test_programs_that_take_too_long_are_judged_each_time(tmp_path):
    for _ in range(2):
        assert judge(tmp_path, SLOW, SLOW, cpu_s=1, total_s=3) == ([0.0, 0.0], 0)
    looping = "```python\nwhile True: pass\n```"
    for _ in range(2):
        inputs = [{"input": "", "output": "4"}]
        assert judge(tmp_path, looping, tests=inputs, cpu_s=1, total_s=3) == ([0.0], 0)

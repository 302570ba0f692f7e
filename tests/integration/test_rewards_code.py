import json
import sys

import pytest

from hybridrl.errors import RewardError
from hybridrl.rewards.code import extract_program, passes_tests
from hybridrl.sandbox import python_runner as sandbox_module
from hybridrl.sandbox.confined import landlock, seccomp
from hybridrl.sandbox.python_runner import find_confinement

SQUARES = ["assert square(2) == 4", "assert square(3) == 9", "assert 0 <= square(0) < 1, 'zero'"]


@pytest.fixture(scope="module")
def sandbox():
    """For tests that run programs. Where the kernel has what it takes, a refusal is a failure."""
    if not landlock.find_landlock_version():
        pytest.skip("the kernel has no Landlock")
    return find_confinement()


def score(program, tests, **options):
    found = passes_tests("", f"```python\n{program}\n```", tests, answer="", **options)
    return found["score"]


def test_the_last_python_block_is_the_program():
    response = "First:\n```python\none\n```\nbetter:\n```py\ntwo\n```\noutput:\n```\n3\n```\n"
    assert extract_program(response) == "two\n"


def test_a_block_without_language_is_better_than_none():
    assert extract_program("so:\n```\none\n```\nand\n```text\ntwo\n```") == "one\n"
    assert extract_program("x = 1\n") == "x = 1\n"


def test_a_block_may_be_indented_cut_off_or_have_fences_inside_a_line():
    assert extract_program("```Python3 title\nx = '```'\n```") == "x = '```'\n"
    assert extract_program("```python\nx = 1\ny =") == "x = 1\ny ="
    assert extract_program("1. so\n   ```python\n   x = 1\n   ```\n") == "   x = 1\n"


def test_a_fence_followed_by_spaces_takes_no_time():
    response = "```python" + " " * 1_000_000
    assert extract_program(response) == response


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        ("[1", "no JSON"),
        ("3", "expected a list with at least one test"),
        ([], "expected a list with at least one test"),
        (None, "expected a list with at least one test"),
        ({"input": "", "output": ""}, "expected a list with at least one test"),
        (["assert f(1) ="], "no valid Python"),
        (["assert True", {"input": "", "output": ""}], "expected only asserts, or only"),
        ([{"input": ""}], "expected only asserts, or only"),
        ([{"input": 1, "output": "1"}], "expected only asserts, or only"),
    ],
)
def test_malformed_tests_are_refused(tests, complaint):
    with pytest.raises(ValueError, match=complaint):
        score("", tests)


def test_the_score_is_the_share_of_asserts_that_hold(sandbox):
    assert score("def square(x): return x * x", SQUARES) == 1.0
    assert score("def square(x): return x * x", json.dumps(SQUARES)) == 1.0
    assert score("def square(x): return 2 * x", SQUARES) == pytest.approx(2 / 3)
    assert score("def cube(x): return 2 * x", SQUARES) == 0.0
    assert score("def square(x) return", SQUARES) == 0.0


def test_a_test_may_have_several_statements(sandbox):
    check = "def check(f):\n    assert f(2) == 4\n    assert f(3) != 8\ncheck(square)"
    assert score("def square(x): return x * x", [check]) == 1.0
    assert score("def square(x): return 4", [check]) == 1.0
    assert score("def square(x): return 8", ["assert square(2) == 8", check]) == 0.5
    assert score("def square(x): return x * x", ["import math", check]) == 0.5


def test_what_comes_out_right_passes_whatever_its_type(sandbox):
    program = """
from collections import Counter, OrderedDict, namedtuple
from fractions import Fraction
import dataclasses
print("noise" * 1000000)
Pair = namedtuple("Pair", "x y")
class Whole(int):
    pass
@dataclasses.dataclass
class Point:
    x: int
class Bag:
    def __contains__(self, x): return x == 3
loop = [1]
loop.append(loop)
if __name__ == "__main__":
    raise SystemExit
"""
    tests = [
        "assert Counter('aab') == {'a': 2, 'b': 1}",
        "assert [Pair(1, [2]), OrderedDict(a=1)] == [(1, [2]), {'a': 1}]",
        "assert Fraction(1, 2) == 0.5 and Whole(3) in (1, 3)",
        "assert Point(1) == Point(1) and Point(1) in [Point(2), Point(1)]",
        "bag = Bag()\nassert Point(1) != Point(2) and 3 in bag and 4 not in bag",
        "assert not 1 == 2 and (1 < 2 < 3) and loop[0] == 1 and loop[1][1][0] == 1",
        "assert all(x > 0 for x in [1, 2]) and {1: {2}} == {1: {2}} and None is None",
    ]
    for test in tests:
        assert score(program, [test]) == 1.0, test


LIARS = {
    "exits": "raise SystemExit(0)",
    "leaves": "import os; os._exit(0)",
    "leaves when tested": "import os\ndef square(x): os._exit(0)",
    "exits when tested": "import sys\ndef square(x): sys.exit(0)",
    "prints": "print('ok', 'passed', 'PASSED', *[f'{i}' for i in range(9)], sep='\\n')",
    "prints everywhere": "import os\nfor i in range(1, 9):\n  try: os.write(i, b'\\n:0\\n')\n"
    "  except OSError: pass",
    "equals all": """
class Equal:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
def square(x): return Equal()
""",
    "equals all as a number": """
class Equal:
    def __eq__(self, other): return True
    __le__ = __ge__ = __lt__ = __gt__ = __eq__
class Number(int):
    __eq__ = Equal.__eq__
    __le__ = __ge__ = __lt__ = __gt__ = __eq__
def square(x): return Number(-5)
""",
    "equals anything": "from unittest.mock import ANY\ndef square(x): return ANY",
    "equals through its metaclass": """
class Meta(type):
    def __eq__(self, other): return True
    __hash__ = type.__hash__
    __le__ = __ge__ = __lt__ = __gt__ = __eq__
    def __getattribute__(self, name): return getattr(int, name)
class Equal(metaclass=Meta): pass
def square(x): return Equal
""",
    "patches Counter": """
import collections
collections.Counter.__eq__ = lambda self, other: True
collections.Counter.__le__ = collections.Counter.__lt__ = collections.Counter.__eq__
def square(x): return collections.Counter()
""",
    "changes builtins": """
import builtins, operator
for name in ("AssertionError", "Exception", "BaseException", "TypeError"):
    setattr(builtins, name, type(name, (), {}))
for name in ("compile", "exec", "eval", "len", "isinstance", "type", "any", "all", "bool"):
    setattr(builtins, name, lambda *a, **k: True)
operator.eq = operator.le = operator.lt = lambda a, b: True
""",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)",
    "never ends": "import time\ndef square(x): time.sleep(1000)",
}


@pytest.mark.parametrize("liar", [name for name in LIARS if name != "never ends"])
def test_a_program_that_only_says_so_passes_nothing(sandbox, liar):
    assert score(LIARS[liar], SQUARES) == 0.0


def test_tests_have_the_real_builtins(sandbox):
    program = "import builtins\nbuiltins.len = lambda x: 3\ndef f(): return []"
    assert score(program, ["assert len(f()) == 3", "assert len(f()) == 0"]) == 0.5


def test_what_was_passed_before_the_end_counts(sandbox):
    program = "import os\ndef square(x): return x * x if x == 2 else os._exit(0)"
    assert score(program, SQUARES) == pytest.approx(1 / 3)


def test_programs_that_do_not_end_pass_nothing_and_raise_nothing(sandbox):
    assert score(LIARS["never ends"], SQUARES, cpu_s=1, total_s=0.5) == 0.0
    assert score("while True: pass", [{"input": "", "output": "1"}] * 50, cpu_s=1, total_s=2) == 0.0


def test_outputs_are_compared_without_spaces_at_ends(sandbox):
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()"
    tests = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "4\n"}]
    assert score(program, tests) == 1.0
    assert score(program, json.dumps([*tests, {"input": "1 1", "output": "3"}])) == pytest.approx(
        2 / 3
    )
    assert score("print(3)\nraise SystemExit(1)", tests) == 0.0
    assert score("if __name__ == '__main__':\n    print(3)\n    exit()", tests) == 0.5


def test_a_machine_that_confines_nothing_runs_nothing(monkeypatch):
    def refuse(level, *rest):
        raise sandbox_module._ConfinementRefusedError(f"no {level}")

    monkeypatch.setattr(sandbox_module, "_run_confined", refuse)
    monkeypatch.setattr(
        sandbox_module,
        "_try_confinement_levels",
        sandbox_module._try_confinement_levels.__wrapped__,
    )
    with pytest.raises(RewardError, match="no namespaces: no none"):
        score("def square(x): return x * x", SQUARES)


@pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
def test_the_system_calls_of_both_machines_are_known():
    for machine in (0, 1):
        filtered = seccomp._assemble_filter(1000, machine)
        assert len(filtered) % 8 == 0
        assert len(filtered) // 8 < 4096  # the most that the kernel takes
    tables = (seccomp._ALLOWED_CALLS, seccomp._PRETENDED_CALLS, seccomp._CONDITIONAL_CALLS)
    for machine in (0, 1):
        numbers = [
            n for table in tables for n in seccomp._parse_syscall_table(table, machine).values()
        ]
        assert len(numbers) == len(set(numbers))
    assert (
        seccomp._argument_conditions(1).keys()
        == seccomp._parse_syscall_table(seccomp._CONDITIONAL_CALLS, 0).keys()
    )

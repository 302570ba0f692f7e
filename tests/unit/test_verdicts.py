"""Tests of programs, cut into what runs in the program's process and what is judged outside."""

import contextlib
import datetime
import json
import math
from collections import Counter, deque
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.rewards.cheating import cheating_attempts
from hybridrl.rewards.confined.comparing import make_compare
from hybridrl.rewards.confined.plain import ObjectFoundError, plain
from hybridrl.rewards.plain_data import Opaque, read_observation
from hybridrl.rewards.splitting import split_tests


def split(*tests):
    return split_tests(tests, "observe", "compare")


def sent(*values):
    """What arrives of values that a program's process has sent."""
    return read_observation(json.dumps(["values", [plain(value, True) for value in values]]))


@pytest.mark.parametrize(
    ("test", "secret"),
    [
        ("assert f(2) == 417", "417"),
        ("assert 417 == f(2)", "417"),
        ("assert f(2) != 417", "417"),
        ("assert f(2) in [417]", "417"),
        ("assert 417 in f(2)", "417"),
        ("assert 417 <= f(2) < 418, 'between'", "between"),
        ("assert f(2) is not None and f(2) == 417", "417"),
        ("assert sorted(f(2)) == [417]", "417"),
        ("assert len(f(2)) == 417", "417"),
        ("assert set(f(2)) == set([417])", "417"),
        ("assert abs(f(2) - 417) < 1e-6", "417"),
        ("import math\nassert math.isclose(f(2), 417, rel_tol=1e-3)", "417"),
        ("import numpy as np\nassert np.allclose(f(2), [417])", "417"),
        ("expected = [417]\nassert f(2) == expected", "expected"),
        ("for x, y in [(1, 417)]:\n    assert f(x) == y", "417"),
        ("cases = [(1, 417)]\nfor x, y in cases:\n    assert f(x) == y", "417"),
        ("assert all(f(x) == y for x, y in zip([1], [417]))", "417"),
        ("assert all(abs(a - b) < 1e-6 for a, b in zip(f(1), [417]))", "417"),
        ("def check(candidate):\n    x = 417\n    assert candidate(1) == x\ncheck(f)", "417"),
        ("assert isinstance(f(1), list)", "417"),
        ("assert f('A').lower() == 'secret'", "lower"),
        ("from collections import Counter\nassert f(1) == Counter('secret')", "secret"),
        ("assert {'a': f(1), 'b': [f(2)]} == {'a': 1, 'b': [417]}", "417"),
        ("assert f(1) == 417 or f(1) == 418", "41"),
        ("assert not f(1) == 417", "417"),
        ("import math\nr = f(1)\nassert math.isclose(r, 417)", "417"),
        ("r = f(1)\nassert round(abs(r), 417) == 2", "417"),
        ("assert [x.value for x in f(1)] == [417]", "417"),
        ("assert [*f(1), 2] == [417, 2]", "417"),
    ],
)
def test_what_is_expected_stays_outside(test, secret):
    (found,) = split(test)
    assert secret not in found.source
    assert "f(" in found.source or "candidate(" in found.source
    assert not found.is_inside


@pytest.mark.parametrize(
    "test",
    [
        "if f(1):\n    assert f(2) == 4",
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "def same(a, b):\n    return a == b\nassert same(f(1), 2)",
        "assert [x for x in range(9) if f(x) == 4] == [2]",
        "assert f(1) is f(2)",
        "f(3)",
    ],
)
def test_what_cannot_be_cut_is_counted(test):
    assert split(test)[0].is_inside


def test_a_verdict_is_as_python_would_have_it():
    (test,) = split("assert f(2) == 4 and len(g(1)) == 3")
    assert test.passes({0: sent(4), 1: sent([1, 2, 3])}) == (True, False)
    assert test.passes({0: sent(5), 1: sent([1, 2, 3])}) == (False, False)
    assert test.passes({0: sent(4)}) == (False, False)  # the second raised
    (test,) = split("assert f(2) == 4 or g(1) == 3")
    assert test.passes({0: sent(4)})[0]  # the second is not looked at


def test_objects_equal_nothing_and_say_themselves_whether_they_are_true():
    class Neither:
        def __bool__(self):
            raise ValueError

    for text in ("assert not f(1)", "assert f(1) == 3", "assert 3 in f(1)"):
        assert not split(text)[0].passes({0: sent(object())})[0]
    for text in ("assert f(1) is not None", "assert f(1)"):
        assert split(text)[0].passes({0: sent(object())})[0]
    for text in ("assert not f(1)", "assert f(1)"):
        assert not split(text)[0].passes({0: sent(Neither())})[0]


@pytest.mark.parametrize("sent_too", [sent(3), sent(2)])
def test_what_an_object_makes_of_itself_is_asked_for_and_judged_outside(sent_too):
    (test,) = split("assert len(f(1)) == 3")
    assert "len(observe_0), made_of=(0,)" in test.source
    assert test.passes({0: sent(object()), 1: sent_too}) == (sent_too == [3], False)
    assert test.passes({0: sent([1, 2, 3]), 1: sent(4)})[0]  # of data, nothing else is asked


def test_two_results_are_compared_outside_unless_they_are_objects():
    (test,) = split("assert f(1) == g(2)")
    assert test.passes({0: sent([1], [1])}) == (True, False)
    assert test.passes({0: read_observation('["holds", true]')}) == (True, True)
    (test,) = split("assert f(1) == 1")  # which nobody asked to compare
    assert not test.passes({0: read_observation('["holds", true]')})[0]


def test_a_variable_that_the_program_needs_goes_in_as_it_is():
    (test,) = split("given = [3, 1]\nf(given)\nassert given == [1, 3]")
    assert "given = [3, 1]" in test.source
    assert test.passes({0: sent([1, 3])})[0]
    known, used = split("number = 5\nassert f(1) == number", "assert f(number) == number * 2")
    assert "number" in used.source and known.passes({0: sent(5)})[0]
    assert used.passes({0: sent(10)})[0]


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) ** 99999999 == 4",
        "assert f(1) * 9999999 == 4",
        "assert f(1) % (1, 2) == 4",
        "assert bytes(f(1)) == b''",
        "assert Fraction(f(1)) == 3",
        "assert int(Decimal(f(1))) == 3",
        "assert sum(f(1), []) == [3]",
        "import numpy as np\nassert np.allclose(f(1), f(2))",
        "assert sum(a * b for a in f(1) for b in f(1) for c in f(1)) == 3",
    ],
)
def test_no_verdict_takes_long(test):
    (found,) = split(test)
    texts = ["x" * 100000, "1e999999999", ["x" * 100000, *[""] * 20000]]
    for value in (10**9999, *texts, list(range(2000)), [[]] * 20000):
        found.passes(dict.fromkeys(range(3), sent(value)))


numbers = st.integers() | st.floats(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False)
moments = st.dates() | st.times() | st.datetimes() | st.timedeltas()
scalars = st.none() | st.booleans() | numbers | st.text() | st.binary() | st.complex_numbers()
values = st.recursive(
    scalars | moments,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(values)
def test_plain_data_arrives_as_it_was(value):
    (found,) = sent(value)
    assert repr(found) == repr(value) or (found == value and type(found) is type(value))


@given(st.text() | st.recursive(scalars.map(repr), st.lists).map(json.dumps))
def test_whatever_is_sent_is_data_or_refused(text):
    with contextlib.suppress(ValueError):
        read_observation(text)


@pytest.mark.parametrize(
    "text",
    [
        '["values", [["range", [0, 1000000000, 1]]]]',
        '["values", [["decimal", "1E+999999999"]]]',
        '["values", [["array", ["U999999999", [1], ["x"]]]]]',
        '["values", [["array", ["U", [100001], ["' + "x" * 9999 + '"' + ', ""' * 100000 + "]]]]]",
        '["values", [["array", ["f8", [99999, 99999], [1]]]]]',
        '["values", [["set", [["list", []]]]]]',
        "[" * 100000,
        '["values", {"a": 1}]',
    ],
)
def test_data_that_would_take_much_is_refused(text):
    with pytest.raises(ValueError, match="no plain data"):
        read_observation(text)


def test_what_is_derived_from_plain_data_is_its_content():
    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert [type(value) for value in sent(Liar(3), Counter("a"), iter([1]))][:2] == [int, Counter]
    assert isinstance(sent(object())[0], Opaque)
    with pytest.raises(ObjectFoundError):
        plain([object()], False)
    assert sent(math.inf, datetime.date(2024, 1, 1))[1] == datetime.date(2024, 1, 1)


class _EqualsAll:
    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


@given(values)
def test_nothing_equals_a_liar_inside(value):
    compare = make_compare()
    assert compare(("==",), (value, value))
    for liar in (_EqualsAll(), [_EqualsAll()], {"a": _EqualsAll()}, (1, _EqualsAll())):
        with pytest.raises(TypeError):
            compare(("==",), (liar, value))


def test_a_patched_class_is_no_longer_plain(monkeypatch):
    compare = make_compare()
    assert compare(("==",), (Fraction(1, 2), 3)) is False
    monkeypatch.setattr(Fraction, "__eq__", lambda *_: True)
    with pytest.raises(TypeError):
        compare(("==",), (Fraction(1, 2), 3))


@pytest.mark.parametrize(
    "program",
    [
        "import gc",
        "from ctypes import c_int",
        "import sys\nsys._getframe(1)",
        "from sys import _current_frames",
        "try: 1 / 0\nexcept Exception as e: e.__traceback__.tb_frame.f_back",
        "getattr(sys, '_getframe')",
        "import builtins\nbuiltins.len = 3",
        "__builtins__['len'] = 3",
        "def len(x): return 3",
    ],
)
def test_attempts_to_cheat_are_seen(program):
    assert cheating_attempts(program, {"len"}) > 0


def test_honest_programs_are_not_suspected():
    assert cheating_attempts("import sys\ninput = sys.stdin.readline\nlist = [1]\nsum = 0") == 0
    assert cheating_attempts("def f(:") == 0

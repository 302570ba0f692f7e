"""Data and objects on their way between a program and its tests, in one process of ours."""

import collections
import datetime
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.sandbox.checked_tests import check_test
from hybridrl.sandbox.confined.data_codec import Frame
from hybridrl.sandbox.confined.judge import Judge
from hybridrl.sandbox.confined.object_exchange import ObjectExchange
from hybridrl.sandbox.confined.vacuous import CheckCounter, VacuousError


class Owner(ObjectExchange):
    """A program's end whose names are these objects."""

    names: dict

    def perform(self, operation, arguments, options):
        if operation == "name":
            return self.names[arguments[0]]
        return super().perform(operation, arguments, options)


@pytest.fixture
def exchange():
    """A judge, and a function that gives it what a program calls `thing`."""
    to_judge, from_program = os.pipe()
    to_program, from_judge = os.pipe()
    owner, judge = Owner(to_program, from_program), Judge(to_judge, from_judge)
    owner.names = {}
    thread = threading.Thread(target=owner.serve)
    thread.start()

    def get(thing):
        owner.names["thing"] = thing
        return judge.as_got(getattr(thing, "__name__", ""), judge.ask("name", ["thing"], {}))

    yield get
    os.close(from_judge)
    thread.join()
    for descriptor in (to_judge, from_program, to_program):
        os.close(descriptor)


numbers = st.integers() | st.floats(allow_nan=False) | st.fractions() | st.decimals(allow_nan=False)
moments = st.dates() | st.times() | st.datetimes() | st.timedeltas()
scalars = st.none() | st.booleans() | numbers | st.text() | st.binary() | st.complex_numbers()
values = st.recursive(
    scalars | moments,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


def sent(value):
    """What arrives of it."""
    end = ObjectExchange(-1, -1)
    text = json.dumps(end.encode(value, Frame(), set()))
    return end.decode(json.loads(text), Frame())


@given(values)
def test_plain_data_arrives_as_it_was(value):
    found = sent(value)
    assert repr(found) == repr(value) or (found == value and type(found) is type(value))


def test_what_holds_itself_arrives_so():
    loop = [1]
    loop.append(loop)
    found = sent(loop)
    assert found[0] == 1 and found[1] is found


@pytest.mark.parametrize(
    "text",
    [
        '["type", "builtins", "eval"]',
        '["type", "os", "system"]',
        '["type", "unittest.case", "SkipTest"]',
        '["type", "unittest.mock", "MagicMock"]',
        '["os.system", "true"]',
        '["object", 1, 3, null]',
        '["object", 1, ["type", "builtins", "ValueError"], ["int", 4]]',
        '["numpy.ndarray", 1, "|O", [1], "00"]',
        '["numpy.ndarray", 1, "<f8", [99999, 99999], "00"]',
        '["set", 1, [["list", 2, []]]]',
        '["bytes", "zz"]',
        '["yours", 3]',
        '{"a": 1}',
    ],
)
def test_what_is_no_data_is_refused(text):
    with pytest.raises((ValueError, TypeError, KeyError, LookupError)):
        ObjectExchange(-1, -1).decode(json.loads(text), Frame())


class Liar:
    def __eq__(self, other):
        return True

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = object.__hash__

    def __add__(self, other):
        return 4

    __radd__ = __sub__ = __add__

    def index(self, item):
        return 0


def test_an_object_has_no_say_about_what_a_test_expects(exchange):
    liar = exchange(Liar())
    assert (liar == 4, 4 == liar) == (False, False)  # noqa: SIM300
    assert liar not in ([4], {4: 4}) and liar == liar
    for question in (
        lambda: 4 in liar,
        lambda: liar < 4,
        lambda: 4 + liar,
        lambda: liar - 4,
        lambda: liar.index(4),
    ):
        with pytest.raises((TypeError, AttributeError)):
            question()


def test_an_object_that_the_test_makes_is_asked_and_one_that_is_returned_is_not(exchange):
    class Stack(Liar):
        def itself(self):
            return self

    stack = exchange(Stack)()
    assert 4 in stack and stack + 4 == 4 and stack != 4
    with pytest.raises(TypeError):
        assert 4 in stack.itself()

    class find(Liar):  # noqa: N801
        pass

    with pytest.raises(TypeError):
        assert 4 in exchange(find)()


def test_what_is_derived_from_plain_data_compares_as_the_data(exchange):
    class Number(int):
        __eq__ = Liar.__eq__
        __hash__ = int.__hash__
        unit = "m"

    found = exchange(Number(3))
    assert found != 4 and found + 1 == 4 and found.unit == "m" and isinstance(found, int)
    pair = exchange(collections.namedtuple("Pair", "x y")(1, [2]))
    assert pair == (1, [2]) and pair.y == [2] and repr(pair) == "Pair(x=1, y=[2])"


def test_lists_are_changed_where_the_program_changes_them(exchange):
    inner = [2, 1]
    given = [inner, {"a": {1}}]

    def change(thing):
        thing[0].sort()
        thing[1]["a"].add(2)
        return thing

    assert exchange(change)(given) is given
    assert given == [[1, 2], {"a": {1, 2}}] and given[0] is inner


def test_functions_of_a_test_are_called_and_no_more(exchange):
    assert exchange(lambda function: function(2) + 1)(lambda x: x * x) == 5
    for reach in ("__globals__", "__code__", "__closure__", "__self__"):
        with pytest.raises(AttributeError):
            exchange(lambda function, name=reach: getattr(function, name))(
                test_what_is_no_data_is_refused
            )


def test_exceptions_cross_but_not_those_of_failed_tests(exchange):
    class EmptyError(LookupError):
        pass

    def fail(kind):
        raise {"own": EmptyError, "exit": SystemExit, "assert": AssertionError}.get(
            kind, ValueError
        )(kind)

    empty = exchange(EmptyError)
    fail_there = exchange(fail)
    with pytest.raises(empty, match="own"):
        fail_there("own")
    with pytest.raises(ValueError, match="other"):
        fail_there("other")
    with pytest.raises(BaseException) as caught:
        fail_there("exit")
    assert not isinstance(caught.value, Exception) and not isinstance(caught.value, SystemExit)


def checks_of(test):
    counter = CheckCounter()
    counter.has_called = True
    exec(
        check_test(test).code,
        {"__builtins__": counter.builtins(), "__passed__": counter.count},
    )
    return counter


@pytest.mark.parametrize(
    ("test", "passed"),
    [
        ("assert True", 1),
        ("# nothing", 0),
        ("x = 1", 0),
        ("def check(f):\n    assert f", 0),
        ("for x in []:\n    assert x", 0),
        ("for x in [1, 2]:\n    assert x", 2),
        ("if 1 != 1:\n    raise ValueError", 1),
        ("try:\n    1 / 0\n    assert False\nexcept ZeroDivisionError:\n    pass", 1),
        ("assert all(x for x in [])", 0),
        ("assert all(x for x in [1])", 1),
        ("r = [1, 2, 3]\nassert all(a < b for a, b in zip(r, r[1:]))", 1),
        ("r = [1]\nassert r == [1] and not list(zip(r, r[1:]))", 1),
    ],
)
def test_checks_are_counted(test, passed):
    assert checks_of(test).passed == passed


@pytest.mark.parametrize(
    "test",
    [
        "assert all(a == b for a, b in zip([], [1]))",
        "assert all(a == b for a, b in zip([1, 2], [1]))",
        "assert all(a == b for a, b in zip(iter([]), [1]))",
        "assert all(map(lambda a, b: a == b, [], [1]))",
        "for a, b in zip([], [1]):\n    assert a == b",
    ],
)
def test_a_pair_left_out_fails_the_test(test):
    with pytest.raises(VacuousError):
        checks_of(test)


@pytest.mark.parametrize(
    ("left", "right", "is_vacuous"),
    [
        ((0,), (2,), True),
        ((0, 1, 1), (), True),
        ((2,), (0,), True),
        ((2, 1), (2, 2), True),
        ((0,), (0,), False),
        ((2,), (), False),
        ((2, 2), (2, 2), False),
    ],
)
def test_arrays_are_not_stretched(left, right, is_vacuous):
    import numpy

    counter = CheckCounter()
    arrays = numpy.zeros(left), numpy.zeros(right)
    if is_vacuous:
        with pytest.raises(VacuousError):
            counter.check_shapes(*arrays)
        if 0 in left:
            with pytest.raises(VacuousError):
                assert (counter.mark_empty(arrays[0]) == arrays[1]).all()
    else:
        counter.check_shapes(*arrays)
    assert counter.vacuous == (2 if is_vacuous and 0 in left else is_vacuous)


def test_a_date_with_a_zone_is_no_plain_data(exchange):
    moment = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert exchange(moment).isoformat() == moment.isoformat()

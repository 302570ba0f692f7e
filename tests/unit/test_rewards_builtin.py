import sys
import threading

import pytest

from hybridrl.errors import MissingPackageError
from hybridrl.rewards.builtin_rewards import boxed, contains, exact, format, length, math, numeric
from hybridrl.rewards.loading import check_function_exists, list_builtin_functions


def test_all_are_listed():
    names = {"boxed", "contains", "exact", "format", "length", "math", "numeric"}
    assert names <= set(list_builtin_functions())
    assert not {"final_number", "boxed_text"} & set(list_builtin_functions())


def test_exact():
    assert exact("", " 75\n", "75") == 1.0
    assert exact("", "75.", "75") == 0.0


def test_contains():
    assert contains("", "it is 75, surely", "75") == 1.0
    assert contains("", "it is 57", "75") == 0.0
    with pytest.raises(ValueError, match="empty"):
        contains("", "anything", " ")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("75", "75"),
        ("first 12, then 75.", "75"),
        ("75.00", "75"),
        ("it costs $1,234.50", "1234.5"),
        ("1,234,567", "#### 1,234,567"),
        ("He has 3 and 4.\n#### 42\nor 17?", "3 + 39 = 42\n#### 42"),
        ("x=-3", "-3"),
        ("-$5", "-5"),
        ("10-3", "3"),  # a range or a subtraction, no sign
        ("so...5", "5"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("1,2345", "2345"),  # no thousands: two numbers
        ("0.1", "0.10"),
        ("12345678901234567891", "12345678901234567891"),
    ],
)
def test_numeric_agrees(response, answer):
    assert numeric("", response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("75 or 76", "75"),
        ("", "75"),
        ("no number", "75"),
        ("42 #### none", "42"),
        ("-75", "75"),
        ("12345678901234567891", "12345678901234567892"),
        ("1e999999999999999999999", "1"),
        ("9" * 5000, "1"),
    ],
)
def test_numeric_disagrees(response, answer):
    assert numeric("", response, answer) == 0.0


def test_numeric_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="'seven' holds no number"):
        numeric("", "7", "seven")


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so \boxed{75}", "75", 1.0),
        (r"\boxed{1} or \boxed{ 75.0 }", "75", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{ 1 }{2}", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1.0),
        (r"\boxed{\text{east}} it is", r"thus \boxed{\text{east}}", 1.0),
        (r"\boxed{0}", "0", 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{75", "75", 0.0),
        (r"\boxed{1} and \boxed{75", "1", 0.0),
        (r"\boxed{}", "75", 0.0),
        ("75", "75", 0.0),
    ],
)
def test_boxed(response, answer, score):
    assert boxed("", response, answer) == score


def test_boxed_needs_an_answer():
    with pytest.raises(ValueError, match="empty"):
        boxed("", r"\boxed{}", " ")


def test_format():
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format("", " <think>a\nb</think>\n<answer>1</answer>\n", pattern=pattern) == 1.0
    assert format("", "well, <think>a</think><answer>1</answer>", pattern=pattern) == 0.0


def test_length():
    assert [length("", "x" * n, limit=4) for n in (0, 4, 5, 9)] == [0.0, 0.0, -1.0, -1.0]
    assert [length("", "x" * n, limit=4, ramp=4) for n in (4, 5, 8, 9)] == [0.0, -0.25, -1.0, -1.0]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"The answer is $\frac{1}{2}$.", "0.5", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        ("72", "48 + 24 = 72\n#### 72", 1.0),
        ("I think 1,234", "$1234$", 1.0),
        ("2", r"\frac{1}{2}", 0.0),
        (r"\boxed{12", "12", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_math(response, answer, score):
    pytest.importorskip("math_verify")
    assert math("", response, answer) == score


def test_math_outside_of_the_main_thread():
    pytest.importorskip("math_verify")
    found = []
    thread = threading.Thread(target=lambda: found.append(math("", "$0.5$", "1/2")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_math_gives_up_on_what_takes_too_long():
    pytest.importorskip("math_verify")
    assert math("", "$9^{9^{9^{9}}}$", "5", timeout_s=1) == 0.0


def test_math_needs_a_readable_answer():
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="nothing to compare with"):
        math("", "5", "")


def test_math_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    for call in (lambda: check_function_exists("math"), lambda: math("", "1", "1")):
        with pytest.raises(MissingPackageError, match=r"pip install 'math-verify>="):
            call()

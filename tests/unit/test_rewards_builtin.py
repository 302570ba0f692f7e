import pytest

from hybridrl.rewards.builtin import contains, exact, numeric


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

"""What is right, as public data sets write it."""

import json

import pyarrow as pa
import pytest

from hybridrl.data.answer_formats import extract_reference_answers
from hybridrl.errors import DataError


@pytest.mark.parametrize(
    "form, text, answer",
    [
        ("gsm8k", "3 * 411 = 1233\n#### 1,234", "1234"),
        ("gsm8k", "#### 1\n#### x, y", "x, y"),
        ("boxed", r"so \boxed{2}, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("plain", "#### 5", "#### 5"),
    ],
)
def test_the_final_answer_is_found(form, text, answer):
    found = extract_reference_answers(pa.table({"solution": [text]}), form, "solution")
    assert found["solution"].to_pylist() == [answer]


def programs_tests(form, **columns):
    table = pa.table({name: [value] for name, value in columns.items()})
    return json.loads(extract_reference_answers(table, form, None)["tests"][0].as_py())


def test_tests_of_programs_are_found():
    assert programs_tests("mbpp", test_list=["assert f(1) == 2"]) == ["assert f(1) == 2"]
    check = "def check(candidate):\n    assert candidate(1) == 2\n"
    assert programs_tests("humaneval", test=check, entry_point="f") == [f"{check}\n\ncheck(f)\n"]
    read = {"inputs": ["1\n2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
    assert programs_tests("apps", input_output=json.dumps(read)) == [
        {"input": "1\n2\n", "output": "3\n"},
        {"input": "3\n4", "output": "7"},
    ]
    called = {"fn_name": "f", "inputs": [[1, "a"]], "outputs": [[True]]}
    assert programs_tests("apps", input_output=json.dumps(called)) == [
        "assert f(1, 'a') in ([True], True)"
    ]


@pytest.mark.parametrize(
    "form, columns, words",
    [
        ("gsm8k", {"answer": "5"}, "Row 1 .*nothing behind a `####`"),
        ("boxed", {"answer": r"\boxed{5"}, r"Row 1 .*no `\\boxed\{\}`"),
        ("mbpp", {"tests": "x"}, "has no such column"),
        ("apps", {"input_output": ""}, "Row 1 of the data is not as data.answer_format"),
    ],
)
def test_a_row_of_another_format_is_named(form, columns, words):
    table = pa.table({name: [value] for name, value in columns.items()})
    with pytest.raises(DataError, match=words):
        extract_reference_answers(table, form, "answer")

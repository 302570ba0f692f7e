"""Reference answers and tests in the formats of public data sets (`data.answer_format`)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from hybridrl.batch.arrow_columns import python_values
from hybridrl.data.encoding import shorten_value
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DataRow
from hybridrl.data.table_columns import find_column, replace_column
from hybridrl.errors import RowError
from hybridrl.system.boxed_text import find_boxed_text

_log = logging.getLogger(__name__)
TESTS_COLUMN = "tests"
"""The column that `hybridrl.rewards.code:passes_tests` reads."""
_BOX_COMMANDS = ("\\boxed{", "\\fbox{")


def extract_reference_answers(
    rows: pa.Table,
    answer_format: str,
    answer_column: str | None,
    refused: RefusedRows | None = None,
) -> pa.Table:
    """Return the rows with the final reference answer alone in its column, or with the column
    `tests`.

    Args:
        refused: Gets the rows whose answers are not of this format; None: they are an error.

    Raises:
        DataError: if a column is missing, or a row is refused that may not be left out.
    """
    refused = RefusedRows() if refused is None else refused
    if answer_format in _TEST_FORMATS:
        columns, make = _TEST_FORMATS[answer_format]
        cells = [
            python_values(find_column(rows, name, refused.origin / "answer_format"))
            for name in columns
        ]
        tests = refused.map(partial(_parse_cells, make), *cells)
        refused.kept(rows.num_rows)
        if answer_format == "livecodebench" and (pickled := sum(map(_is_pickled, cells[1]))):
            _log.warning(
                "%d of %d rows have private tests as compressed pickles, which are not opened, "
                "because that would run code of the file. Their public tests count alone.",
                pickled,
                rows.num_rows,
            )
        texts = pa.array([json.dumps(test) for test in tests], pa.large_string())
        return replace_column(rows, TESTS_COLUMN, texts)
    if answer_format == "plain" or answer_column is None:
        return rows
    find = _parse_gsm8k_answer if answer_format == "gsm8k" else _parse_boxed_answer
    cells = python_values(find_column(rows, answer_column, refused.origin / "answer_column"))
    found = refused.map(partial(_parse_cells, find), cells)
    refused.kept(rows.num_rows)
    return replace_column(rows, answer_column, pa.array(found, pa.large_string()))


def _parse_cells(make: Callable[..., Any], row: DataRow, *cells: Any) -> Any:
    try:
        return make(*cells)
    except (ValueError, TypeError, KeyError) as error:
        raise RowError(
            f"{row} is not as {row / 'answer_format'} says: {error}. Mend the row or leave it out, "
            "or name another format.",
            "without an answer of its format",
        ) from error


def _parse_gsm8k_answer(text: Any) -> str:
    """Return the text after the last `####` without thousands separators, as GSM8K writes
    answers."""
    _, marks, answer = str(text).rpartition("####")
    if not marks or not answer.strip():
        raise ValueError(f"the answer {shorten_value(text)} has nothing behind a `####`")
    return re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())


def _parse_boxed_answer(text: Any) -> str:
    r"""Return the text in the last `\boxed{...}`, as MATH writes solutions."""
    solution = str(text)
    bare = solution.rpartition("\\boxed ")[2]  # `$\boxed 2$`
    is_bare = bare != solution and not any(box in bare for box in _BOX_COMMANDS)
    if is_bare and (found := str(re.split(r"[$\n]", bare)[0]).strip()):
        return found
    if found := (find_boxed_text(solution, _BOX_COMMANDS) or "").strip():
        return found
    raise ValueError(
        f"the answer {shorten_value(solution)} has no `\\boxed{{}}` with something in it"
    )


def _parse_mbpp_tests(tests: Any) -> list[str]:
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f"`test_list` is {shorten_value(tests)}, expected a list of asserts")
    return [str(test) for test in tests]


def _parse_humaneval_tests(test: Any, entry_point: Any) -> list[str]:
    if not isinstance(test, str) or not isinstance(entry_point, str) or not entry_point:
        raise ValueError("`test` and `entry_point` must be texts")
    return [f"{test}\n\ncheck({entry_point})\n"]


def _parse_apps_tests(text: Any) -> list[Any]:
    said = json.loads(text) if isinstance(text, str) else text
    if not isinstance(said, Mapping) or not said.get("inputs"):
        raise ValueError(
            f"`input_output` is {shorten_value(text)}, expected `inputs` and `outputs`"
        )
    pairs = list(zip(said["inputs"], said["outputs"], strict=True))
    if (name := said.get("fn_name")) is None:
        return [
            {"input": _join_lines(given), "output": _join_lines(wanted)} for given, wanted in pairs
        ]
    return [_format_call_assert(str(name), given, wanted) for given, wanted in pairs]


def _livecodebench(public: Any, private: Any, metadata: Any, starter_code: Any) -> list[Any]:
    """The public tests, and the private ones where they are JSON: LiveCodeBench compresses most of
    them as pickles, which run code when they are opened."""
    told = json.loads(metadata or "{}").get("func_name")
    call = f"Solution().{told}" if "class Solution" in (starter_code or "") else told
    found: list[Any] = []
    for text in (public, private):
        for test in json.loads(text) if str(text).lstrip().startswith("[") else ():
            if test["testtype"] != "functional":
                found.append({"input": test["input"], "output": test["output"]})
                continue
            given = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
            wanted = json.loads(test["output"])
            found.append(f"assert {call}({', '.join(map(repr, given))}) == {wanted!r}")
    if not found:
        raise ValueError("`public_test_cases` has no tests")
    return found


def _is_pickled(cell: Any) -> bool:
    return isinstance(cell, str) and bool(cell) and not cell.lstrip().startswith("[")


def _join_lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _format_call_assert(name: str, given: Sequence[Any], wanted: Any) -> str:
    """Return an assert that calls the function; an expected list of one item also matches that
    item."""
    call = f"{name}({', '.join(map(repr, given))})"
    if isinstance(wanted, list) and len(wanted) == 1:
        return f"assert {call} in ({wanted!r}, {wanted[0]!r})"
    return f"assert {call} == {wanted!r}"


_TEST_FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[..., list[Any]]]] = {
    "mbpp": (("test_list",), _parse_mbpp_tests),
    "humaneval": (("test", "entry_point"), _parse_humaneval_tests),
    "apps": (("input_output",), _parse_apps_tests),
    "livecodebench": (
        ("public_test_cases", "private_test_cases", "metadata", "starter_code"),
        _livecodebench,
    ),
}
"""The columns that a set has its tests in, and what makes a list of tests of them."""

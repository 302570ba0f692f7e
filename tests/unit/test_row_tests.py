"""Rows whose tests say nothing of a program are found while the data is read."""

import json

import pyarrow as pa
import pytest
from settings import configured

from hybridrl.checks.data import row_tests
from hybridrl.checks.data.row_tests import TESTED, check_tests
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.refused_rows import RefusedRows, collected
from hybridrl.errors import DataError

SOUND = ["assert double(2) == 4"]
VACUOUS = {
    "a comment": ["# nothing"],
    "a class that nobody runs": ["class T:\n    def test(self):\n        assert f(1) == 2\n"],
    "an empty test of unittest": [
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): pass"
    ],
    "an assert of nothing": [*SOUND, "assert True"],
    "an assert that is not reached": ["for x in []:\n    assert f(x) == 2"],
    "nothing to print": [{"input": "1", "output": "1"}, {"input": "2", "output": " \n"}],
}
NOT_THERE = ["import torchnothing.sub\nassert f(1) == 2"]


@pytest.fixture
def read(tmp_path):
    """Reads rows of these tests as a job does."""

    def load(tests, *overrides):
        lines = [json.dumps({"prompt": "p", "tests": one}) + "\n" for one in tests]
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        config = configured(
            [
                "data=jsonl",
                f"data.path={tmp_path}/rows.jsonl",
                "data.answer_column=null",
                f"reward.function={TESTED}",
                *overrides,
            ]
        )
        with collected(check_tests(config)):
            tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
            return load_rows("prompts", config.data, tokenizer, held_out=0, seed=0).training

    return load


@pytest.mark.parametrize("tests", VACUOUS.values(), ids=VACUOUS)
def test_tests_that_an_empty_program_passes_are_refused(read, tests):
    sound = SOUND if isinstance(tests[0], str) else tests[:1]
    with pytest.raises(DataError) as caught:
        read([sound, tests, sound], "data.bad_rows_limit=0.5")
    said = str(caught.value)
    assert "Row 2 of the data (" in said and "rows.jsonl" in said and "data.bad_rows=drop" in said
    assert "1 whose tests prove nothing" in said and repr(tests[-1])[:30] in said


def test_imports_that_are_not_there_are_refused_with_how_many_rows(read):
    guarded = ["try:\n    import torchnothing\nexcept ImportError:\n    pass\nassert f(1) == 2"]
    there = ["import json, numpy.linalg\nfrom solution import f\nassert f(1) == 2"]
    with pytest.raises(
        DataError, match=r"Row 3 of .*import `torchnothing`.*Install what"
    ) as caught:
        read([guarded, there, NOT_THERE, NOT_THERE])
    assert "2 whose tests import torchnothing" in str(caught.value)


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (
            ["def check_it():\n    assert f(1) == 2"],
            r"check_it, which nothing calls.* check_it\(\)\.",
        ),
        (["assert f(1) == "], "is no valid Python"),
        ([], "expected a list with at least one test"),
        ([{"input": "1"}], "expected only asserts, or only dictionaries"),
        ("no JSON", "is a text but no JSON"),
    ],
)
def test_tests_that_cannot_judge_a_program_are_a_fault_of_their_row(tests, words):
    column = [
        json.dumps(SOUND),
        tests if isinstance(tests, str) else json.dumps(tests),
    ]
    refused, rows = RefusedRows("x.jsonl"), pa.table({"tests": column})
    config = configured([f"reward.function={TESTED}"])
    check_tests(config)(config.data, rows, refused)
    with pytest.raises(DataError, match=f"(?s)Row 2 of the data .*{words}.*Mend the tests"):
        refused.kept(2)


def test_such_rows_may_be_left_out(read, caplog):
    rows = read(
        [SOUND, VACUOUS["a comment"], NOT_THERE, ["assert ("], SOUND],
        "data.bad_rows=drop",
        "data.bad_rows_limit=0.9",
    )
    assert [list(one) for one in rows["tests"]] == [SOUND, SOUND]
    for reason in ("prove nothing", "import torchnothing", "cannot be read"):
        assert f"1 whose tests {reason}" in caplog.text


def test_tests_that_nobody_reads_are_left_alone(read):
    assert (
        len(read([VACUOUS["a comment"]], "reward.function=hybridrl.rewards.format_rewards:length"))
        == 1
    )
    assert len(read([["assert ("], SOUND], "reward.on_error=drop")) == 2


def test_a_large_file_is_tried_for_a_bounded_time(read, monkeypatch, caplog):
    monkeypatch.setattr(row_tests, "LONGEST_S", -1.0)
    assert len(read([VACUOUS["a comment"]])) == 1
    assert "0 of 1 rows were tried on an empty program" in caplog.text


def test_sources_have_their_own_functions(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "p", "tests": ["# x"]}) + "\n")
    (tmp_path / "b.jsonl").write_text("")
    path = f"answer_column: null, path: {tmp_path}"
    config = configured(
        [
            "data=mixture",
            f"data.sources.tested={{{path}/a.jsonl, reward: ['{TESTED}']}}",
            f"data.sources.read={{{path}/b.jsonl, reward: [length]}}",
            "reward.options.length.limit=9",
        ]
    )
    check, rows = check_tests(config), pa.table({"tests": [["# x"]]})
    found = {}
    for source in row_tests.parse_sources(config.data):
        refused = RefusedRows("a.jsonl", drop=True)
        check(source.data, rows, refused)
        found[source.name] = refused.figures()["left_out"]
    assert found == {"tested": 1, "read": 0}

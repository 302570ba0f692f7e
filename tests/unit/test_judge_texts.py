"""Rubrics, grades and rankings as texts."""

import math

import pytest

from hybridrl.errors import ConfigError, DataError
from hybridrl.rewards.rubrics import load_rubric, parse_rubric, read_row_rubric, rubric_score
from hybridrl.workers.llm_judge import DEFAULT_PATTERNS, parse_grade, parse_ranking


def ranking(text, answers):
    return parse_ranking(text, DEFAULT_PATTERNS["rank"], answers)


def test_a_ranking_gives_scores_in_equal_steps():
    assert ranking("Well.\nRanking: 3 > 1 > 2", 3) == [0.5, 0.0, 1.0]
    assert ranking("ranking: 2>1\nor rather\nRanking: 1 > 2", 2) == [1.0, 0.0]
    assert ranking("Ranking: 1", 1) == [1.0]


def test_ties_share_the_mean_of_their_places():
    assert ranking("Ranking: 4 > 1 = 2 = 3", 4) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert ranking("Ranking: 1 = 2", 2) == [0.5, 0.5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3 > 1 > 2",
        "Ranking: 1 > 2",
        "Ranking: 1 > 2 > 2",
        "Ranking: 1 > 2 > 4",
        "Ranking: 1 2 3",
    ],
)
def test_a_ranking_that_does_not_name_each_answer_once_is_none(text):
    assert all(map(math.isnan, ranking(text, 3)))


def test_rubrics_may_be_written_in_several_ways(tmp_path):
    expected = [("is short", 1.0), ("cites", 2.0), ("is rude", -3.0)]
    given = [
        "is short",
        {"criterion": "cites", "weight": 2},
        {"criterion": "is rude", "points": -3},
    ]
    assert parse_rubric(given) == expected
    path = tmp_path / "rubric.yaml"
    path.write_text(
        "- is short\n- {criterion: cites, weight: 2}\n- {criterion: is rude, points: -3}"
    )
    assert load_rubric(str(path)) == expected
    assert read_row_rubric({"checks": '["is short"]'}, "checks") == expected[:1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "a list"),
        ("x", "a list"),
        ([{}], "no criterion"),
        ([{"criterion": "a", "weight": "b"}], "no number"),
        ([{"criterion": "a", "weight": -1}], "above 0"),
        ([{"criterion": "a", "weight": math.inf}], "not finite"),
    ],
)
def test_what_is_no_rubric_is_said(given, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        parse_rubric(given)
    with pytest.raises(DataError, match="rubric_column=c: the row whose prompt begins with 'Why"):
        read_row_rubric({"prompt": "Why?", "c": given}, "c")
    with pytest.raises(ConfigError, match="could not be read"):
        load_rubric(str(tmp_path / "none.json"))


def test_the_share_of_a_rubric_that_is_met():
    rubric = parse_rubric(
        ["a", {"criterion": "b", "weight": 3}, {"criterion": "bad", "weight": -2}]
    )
    assert rubric_score(rubric, [1.0, 0.5, 0.0]) == 2.5 / 4
    assert rubric_score(rubric, [0.0, 0.0, 1.0]) == 0.0
    assert rubric_score(rubric, [1.0, 1.0, 1.0]) == 0.5
    assert math.isnan(rubric_score(rubric, [1.0, math.nan, 0.0]))


def test_the_last_grade_counts():
    assert parse_grade("Score: 3, no: score: 8", DEFAULT_PATTERNS["grade"], 10.0) == 0.8
    assert math.isnan(parse_grade("none", DEFAULT_PATTERNS["grade"], 10.0))

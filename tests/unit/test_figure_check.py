"""Figures that others report: what is no named number is left out, and told once."""

import math
import re

import numpy as np
import pytest
import torch

from hybridrl.batch.call_record import FigureCheck, fault_of_name, number_of
from hybridrl.errors import ConfigError
from hybridrl.rewards.returned_scores import parse_row_score

GARBAGE = {
    "text": ("abc", r"which is not a number \(str\)"),
    "none": (None, r"not a number \(NoneType\)"),
    "list": ([1, 2], r"not a number \(list\)"),
    "huge": (10**400, r"which is too large \(int\)"),
    "object": (object(), r"not a number \(object\)"),
    "tensor": (torch.zeros(3), r"not a number \(Tensor\)"),
    "complex": (1j, r"not a number \(complex\)"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_what_is_no_number_is_left_out_and_told_once(kind):
    value, words = GARBAGE[kind]
    said = []
    check = FigureCheck(said.append)
    for _ in range(2):
        assert check.figures({"a": 1.5, "b": value}, "`actor.update_actor`") == {"a": 1.5}
    (sentence,) = said
    assert sentence.startswith("`actor.update_actor` reported the metric 'b', ")
    assert re.search(words, sentence)
    assert check.figures({"b": value}, "`critic.update_critic`") == {} and len(said) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x" * 100_000, "100,000 characters"),
        ("", "0 characters"),
        ("mine/<script>\n\x1b[31m", "cannot be printed"),
        ("half \ud800", "cannot be printed"),
        (3, "is a int, not a text"),
    ],
)
def test_what_is_no_name_is_left_out(name, words):
    said = []
    assert FigureCheck(said.append).figures({name: 1.0, "zwölf & <12>": 2}, "x") == {
        "zwölf & <12>": 2.0
    }
    assert words in said[0] and len(said[0]) < 300 and "\x1b" not in said[0]


def test_numbers_of_any_kind_are_floats_and_infinities_nan():
    numbers = [1, True, 2.5, np.float32(0.5), np.int64(3), torch.tensor(4.0), torch.tensor(5)]
    assert list(map(number_of, numbers)) == [1.0, 1.0, 2.5, 0.5, 3.0, 4.0, 5.0]
    assert all(math.isnan(number_of(x)) for x in (math.nan, math.inf, torch.tensor(-math.inf)))


def test_few_sentences_whatever_is_reported():
    said = []
    check = FigureCheck(said.append)
    assert check.figures({str(n): None for n in range(10_000)}, "x") == {}
    assert len(said) == 20


def test_what_is_no_dictionary_is_refused():
    with pytest.raises(ConfigError, match=r"`Mine.evaluate` gave a list: it must be a dictionary"):
        FigureCheck(print).figures([1.0], "`Mine.evaluate`")


def test_numbers_that_rewards_give_have_names_that_can_be_written():
    assert parse_row_score({"score": 1, "a" * 251: 2}, "").endswith("1 to 250 are allowed")
    assert parse_row_score({"score": 1, "a\x1b": 2}, "").endswith("cannot be printed")
    assert parse_row_score(10**400, "").startswith("inf, and a score must be a finite number")
    assert fault_of_name("a" * 250) == ""

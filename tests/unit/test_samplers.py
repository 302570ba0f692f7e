"""Samplers: which rows come next by what is known of their pass rates."""

import json

import numpy as np
import pytest
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.data.samplers import build_sampler, check_sampler
from hybridrl.data.samplers.difficulty_columns import assign_buckets, rank_values
from hybridrl.errors import ConfigError

LEVELS = np.repeat([1.0, 2.0, 3.0, 4.0], 250)
RATES = {1.0: 0.99, 2.0: 0.5, 3.0: 0.02, 4.0: 0.0}


def made(*overrides, rows=None):
    config = configured(overrides)
    check_sampler(config)
    rows = Batch.from_columns({"difficulty_n": LEVELS}) if rows is None else rows
    return build_sampler(config, rows, config.run.seed)


def learned(sampler, rates, steps, number=16, seed=0):
    """The levels of the rows of the last of so many steps, eight samples a row."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        rows = sampler.draw(number)
        of_rows = np.repeat(rows, 8)
        scores = (random.random(len(of_rows)) < [rates[LEVELS[row]] for row in of_rows]).astype(
            float
        )
        scores[0] = np.nan  # one is dropped
        sampler.update(of_rows, scores.astype(np.float32))
    return LEVELS[sampler.draw(400)]


def test_pass_rate_comes_to_prefer_rows_between_always_and_never():
    sampler = made("data.sampler=pass_rate")
    first = LEVELS[sampler.draw(400)]
    assert all((first == level).mean() > 0.15 for level in RATES), "what is unknown is tried"
    drawn = learned(sampler, RATES, 15)  # 240 of a thousand rows were asked
    assert (drawn == 2.0).mean() > 0.5 > 0.2 > (drawn == 1.0).mean()
    # The policy learns: what was too hard comes, what is mastered goes.
    later = learned(sampler, {1.0: 1.0, 2.0: 1.0, 3.0: 0.5, 4.0: 0.0}, 40)
    assert (later == 3.0).mean() > 0.5 > 0.3 > (later == 2.0).mean()


def test_pass_rate_tells_rows_apart_that_nothing_else_does():
    sampler = made("data.sampler=pass_rate", rows=Batch.from_columns({"answer": ["a"] * 40}))
    for _ in range(10):
        rows = sampler.draw(40)
        assert sorted(rows) == list(range(40)), "none comes twice"
        of_rows = np.repeat(rows, 8)
        scores = np.where(of_rows < 20, np.tile([0, 1], 160), of_rows % 2).astype(np.float32)
        sampler.update(of_rows, scores)
    assert (np.concatenate([sampler.draw(15) for _ in range(10)]) < 20).mean() > 0.75
    assert len(sampler.draw(100)) == 100 and len(sampler.draw(0)) == 0


def drawn_first(sampler, draws=200):
    """How often, of two rows, the first is preferred."""
    return sum(int(sampler.draw(1)[0]) == 0 for _ in range(draws)) / draws


def test_a_row_is_known_by_its_own_right_samples_until_they_are_old():
    options = "data.sampler_options={low: 0.7, high: 1.0, half_life: 1}"
    two = Batch.from_columns({"answer": ["a", "b"]})
    sampler = made("data.sampler=pass_rate", options.replace(" 1}", " 1000}"), rows=two)
    rows, scores = np.repeat([0, 1], 64), np.repeat(np.float32([1, 0]), 64)
    sampler.update(rows, scores)
    assert drawn_first(sampler) > 0.9, "the first was right, the second wrong"
    # What was seen long ago counts no more: only what rows have in common does.
    sampler = made("data.sampler=pass_rate", options, rows=two)
    sampler.update(rows, scores)
    for _ in range(20):
        sampler.draw(1)
    assert 0.35 < drawn_first(sampler) < 0.65
    sampler = made("data.sampler=pass_rate", options, rows=two)
    for right in ([1, 1, 1, 1], [0]):
        sampler.draw(1)
        sampler.update(np.zeros(len(right), np.int64), np.float32(right))
    assert sampler.state()["counts"] == [[2.0, 1.0]], "a step later four samples count as two"


def test_difficulty_rises_when_a_level_is_mastered_and_falls_when_none_is_right():
    sampler = made("data.sampler=difficulty", "data.sampler_options.samples=64")
    assert set(LEVELS[sampler.draw(32)]) == {1.0}
    drawn = learned(sampler, {1.0: 1.0, 2.0: 0.5, 3.0: 0.0, 4.0: 0.0}, 4)
    assert sampler.level == 1 and set(drawn) == {1.0, 2.0} and (drawn == 2.0).mean() > 0.6
    learned(sampler, dict.fromkeys(RATES, 1.0), 12)
    assert sampler.level == 3
    learned(sampler, dict.fromkeys(RATES, 0.0), 20)
    assert sampler.level == 0


@pytest.mark.parametrize("name", ["pass_rate", "difficulty"])
def test_a_sampler_goes_on_where_it_stopped(name):
    first, second = made(f"data.sampler={name}"), made(f"data.sampler={name}")
    learned(first, RATES, 5)
    second.load_state(json.loads(json.dumps(first.state())))
    for _ in range(2):
        assert np.array_equal(first.draw(16), second.draw(16))
        for sampler in (first, second):
            sampler.update(np.arange(8), np.ones(8, np.float32))


def test_buckets_are_of_one_source_and_difficulty():
    rows = Batch.from_columns(
        {"source": ["a", "a", "b", "b"], "difficulty_n": [1.0, 2.0, np.nan, np.nan]}
    )
    found = assign_buckets(rows, ["difficulty_n"])
    assert found[2] == found[3] and len(set(found.tolist())) == 3
    many = rank_values(Batch.from_columns({"n": np.arange(1000.0)}), "n")
    assert many.min() == 0 and many.max() == 15 and (np.diff(many) >= 0).all()


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["data.sampler=pass_rates"], "must be one of pass_rate, difficulty.*Did you mean"),
        (["data.sampler=pass_rate", "data.sampler_options.lo=0.1"], "no such option.*low"),
        (["data.sampler=pass_rate", "data.sampler_options.low=0.9"], "low=0.9 and high=0.8"),
        (["data.sampler=pass_rate", "data.sampler_options.memory=0"], "memory=0"),
        (["data.sampler=pass_rate", "data.sampler_options.low=few"], "low=few: .* cannot work"),
        (["data.sampler=difficulty", "data.sampler_options.columns=[level]"], "no such column"),
        (["data.sampler=difficulty", "data.sampler_options.review=1"], "review=1"),
    ],
)
def test_what_will_not_do_is_a_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words):
        made(*overrides)
    with pytest.raises(ConfigError, match="none that begins with `difficulty_`"):
        made("data.sampler=difficulty", rows=Batch.from_columns({"answer": ["a"]}))

"""The way of a sync: what is set, or what takes less time on the link that there is."""

import pytest

from hybridrl.weights.sync_choice import SyncMethodChoice


def run(choice, seconds, syncs):
    """The methods of so many syncs, which take `seconds[method]`."""
    taken = []
    for _ in range(syncs):
        measures, method = choice.measures, choice.method()
        if measures:
            choice.note(method, seconds[method])
        taken.append(method)
    return taken


def test_each_way_is_tried_once_where_one_is_clearly_faster():
    choice = SyncMethodChoice("auto")
    assert choice.measures and choice.keeps
    seconds = {"full": 2.0, "plain": 1.9, "delta": 0.5}
    assert run(choice, seconds, 50) == ["full", *["delta"] * 49]
    assert choice.keeps
    choice = SyncMethodChoice("auto")
    assert run(choice, seconds | {"delta": 2.1}, 50) == ["full", "delta", *["plain"] * 48]
    assert not choice.keeps


def test_values_are_timed_without_records_where_these_may_be_what_takes_long():
    seconds = {"full": 2.0, "plain": 0.6, "delta": 1.0}
    assert run(SyncMethodChoice("auto"), seconds, 10) == ["full", "delta", *["plain"] * 8]
    taken = run(SyncMethodChoice("auto"), seconds | {"plain": 1.6}, 10)
    assert taken == ["full", "delta", "plain", *["delta"] * 7]


def test_ways_that_are_close_are_tried_more_often_and_the_best_time_counts():
    choice, taken = SyncMethodChoice("auto"), []
    for seconds in (1.7, 1.3, 1.2, 1.1, 9.0, 1.3, 1.0):  # the first syncs of all take longer
        taken.append(choice.method())
        choice.note(taken[-1], seconds)
    assert taken == ["full", "delta", "plain", *["delta", "plain"] * 2]
    assert choice.method() == "plain"


def test_the_other_way_is_tried_again_in_little_of_the_time():
    seconds = {"full": 10.0, "delta": 1.0, "plain": 9.0}
    taken = run(SyncMethodChoice("auto"), seconds, 2000)
    trials = taken[2:].count("full")
    assert trials >= 2 and trials * 10.0 <= 0.03 * 2000


@pytest.mark.parametrize(("before", "after"), [("plain", "delta"), ("delta", "plain")])
def test_a_way_that_became_slower_than_the_other_one_is_left(before, after):
    choice = SyncMethodChoice("auto")
    run(choice, {"full": 3.5, before: 1.0, after: 3.0}, 5)
    assert not choice.measures  # which takes time, too: one of ten syncs says enough
    seconds = {"full": 5.5, before: 5.0, after: 1.0}
    taken = run(choice, seconds, 10)
    assert taken == [before] * 10  # a single slow one may be an accident
    taken = run(choice, seconds, 30)
    assert taken[-8:] == [after] * 8


def test_what_is_set_is_taken_and_refreshed():
    assert [SyncMethodChoice("full").method() for _ in range(3)] == ["plain"] * 3
    assert not SyncMethodChoice("full").keeps and not SyncMethodChoice("full").measures
    choice = SyncMethodChoice("int4_delta", refresh=3)
    assert [choice.method() for _ in range(7)] == [
        *["int4_delta", "int4_delta", "full"] * 2,
        "int4_delta",
    ]
    choice.restart()
    assert [choice.method() for _ in range(3)] == ["int4_delta", "int4_delta", "full"]
    assert choice.keeps
    exact = SyncMethodChoice("delta", refresh=2)
    assert [exact.method() for _ in range(3)] == ["delta"] * 3

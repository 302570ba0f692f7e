"""The process of a judge's engine: what it says when it fails."""

import pickle

from hybridrl.errors import ConfigError
from hybridrl.workers.engine_process import make_picklable


class OfTwoError(Exception):
    """Pickles, but cannot be built of its one argument again."""

    def __init__(self, what, why):
        super().__init__(f"{what} because {why}")


def test_errors_that_do_not_travel_keep_their_words():
    assert make_picklable(before := ConfigError("wrong", "also")) is before
    unsendable = ValueError("no room", lambda: None)
    for error in (OfTwoError("it fell", "it rained"), unsendable):
        there = pickle.loads(pickle.dumps(make_picklable(error)))
        assert str(error) in str(there) and type(error).__name__ in str(there)

"""What is wrong in several places is told at once."""

import pickle

import pytest
from settings import configured

from hybridrl.checks.check_list import check
from hybridrl.errors import ConfigError, DataError, ErrorCollector, MissingPackageError

HERE = ["executor=inline", "rollout=transformers"]


def test_settings_that_are_wrong_for_themselves_are_all_named():
    wrong = ["rollout.min_tokens=9999", "model.dtype=float16", "guard.on_nan=rewind"]
    with pytest.raises(ConfigError) as raised:
        check(configured([*HERE, *wrong]))
    assert len(raised.value.problems) == 3
    said = str(raised.value).splitlines()
    assert said[0] == "3 things are wrong:" and all(line.startswith("* ") for line in said[1:])
    for name in ("rollout.min_tokens=9999", "model.dtype=float16", "guard.on_nan=rewind"):
        assert sum(problem.startswith(name) for problem in raised.value.problems) == 1


def test_a_single_problem_reads_as_it_was_written_and_keeps_its_kind():
    problems = ErrorCollector()
    for _ in range(2):
        with problems.noted():
            raise MissingPackageError("peft is not installed.")
    with pytest.raises(MissingPackageError, match=r"^peft is not installed\.$"):
        problems.raise_if_any()
    ErrorCollector().raise_if_any()


def test_several_kinds_become_one_error_that_travels():
    problems = ErrorCollector()
    with problems.noted():
        raise DataError("row 3")
    with problems.noted(besides=["data.path"]):
        raise ConfigError("data.path=x: again", "model.path=y: none")
    with pytest.raises(ConfigError) as raised:
        problems.raise_if_any()
    assert raised.value.problems == ("row 3", "model.path=y: none")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)

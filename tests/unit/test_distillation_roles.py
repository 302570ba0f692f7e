"""The program of distillation: its roles, and whose rows are whose."""

import pytest
from settings import configured

from hybridrl.errors import ConfigError
from hybridrl.trainers.distillation import Trainer, group_rows_by_teacher

PATH = "models.teacher.path=teacher"


def roles(*overrides):
    return Trainer.roles(configured(["algorithm=distillation", *overrides]))


def test_teachers_are_roles_of_their_own():
    assert set(roles(PATH)) == {"actor", "reward", "teacher"}
    by_source = [PATH, "distillation.by=source", "models.teacher_math.path=other"]
    found = roles(*by_source)
    assert set(found) == {"actor", "reward", "teacher", "teacher_math"}
    assert found["teacher_math"].keywords == {"top_k": 64}
    assert roles(PATH, "distillation.loss=sampled")["teacher"].keywords == {"top_k": 0}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], r"models\.teacher\.path=<folder>\."),
        (["distillation.by=source"], r"teacher_<value of source>\.path"),
        (["models.teacher.parallel.tp=2"], r"models\.teacher\.path is not set"),
    ],
)
def test_what_is_missing_is_said(overrides, said):
    with pytest.raises(ConfigError, match=said):
        roles(*overrides)


def test_each_row_has_its_teacher():
    groups = ["actor", "teacher", "teacher_math", "teacher_7"]
    found = group_rows_by_teacher(["math", "code", 7, "math"], "source", groups)
    assert {name: rows.tolist() for name, rows in found.items()} == {
        "teacher_math": [0, 3],
        "teacher": [1],
        "teacher_7": [2],
    }
    with pytest.raises(ConfigError, match=r"source=code.*models\.teacher_code\.path"):
        group_rows_by_teacher(["code"], "source", ["teacher_math"])

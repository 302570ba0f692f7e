"""What teachers and judges need of the data, found before anything starts."""

import pytest
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.checks.data.row_checks import check_rubrics, check_teacher_columns
from hybridrl.errors import ConfigError, DataError

ROWS = Batch.from_columns(
    {
        "prompt": ["1+1=", "2+2="],
        "answer": ["2", "4"],
        "source": ["a", "b"],
        "criteria": ['["c"]', "[]"],
    }
)
DISTILLATION = ["algorithm=distillation", "models.teacher_a.path=t"]


def test_a_column_of_the_teachers_prompt_that_rows_have_not(tmp_path):
    file = tmp_path / "hint.txt"
    chosen = ["algorithm=distillation", "distillation.teacher=self"]
    chosen.append(f"distillation.teacher_prompt={file}")
    file.write_text("{prompt} {answr}")
    with pytest.raises(ConfigError, match=r"no column `answr`.*Did you mean `?answer"):
        check_teacher_columns(configured(chosen), ROWS)
    file.write_text("{prompt} {answer}")
    check_teacher_columns(configured(chosen), ROWS)


def test_a_row_without_a_teacher():
    chosen = [*DISTILLATION, "distillation.by=source"]
    with pytest.raises(ConfigError, match="source=b, for which there is no teacher"):
        check_teacher_columns(configured(chosen), ROWS)
    check_teacher_columns(configured([*chosen, "models.teacher.path=t"]), ROWS)
    check_teacher_columns(configured(), ROWS)


def test_rubrics_that_cannot_be_read(tmp_path):
    judged = ["reward.judge.path=j"]
    with pytest.raises(ConfigError, match="could not be read"):
        check_rubrics(configured([*judged, f"reward.judge.rubric={tmp_path / 'none'}"]), ROWS)
    with pytest.raises(DataError, match=r"begins with '2\+2=' has no rubric"):
        check_rubrics(configured([*judged, "reward.judge.rubric_column=criteria"]), ROWS)
    with pytest.raises(ConfigError, match="no such column"):
        check_rubrics(configured([*judged, "reward.judge.rubric_column=other"]), ROWS)
    check_rubrics(configured(judged), ROWS)

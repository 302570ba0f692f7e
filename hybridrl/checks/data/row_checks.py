"""Whether teachers and judges find in the rows of this data what their settings name."""

from __future__ import annotations

from hybridrl.batch.batch import Batch, is_of_data
from hybridrl.config.schema import Config
from hybridrl.config.setting import Setting
from hybridrl.errors import ConfigError, nearest
from hybridrl.rewards.rubrics import load_rubric, rubric_of
from hybridrl.trainers.distillation import rows_by_teacher
from hybridrl.trainers.teacher_prompt import TeacherPrompt


def check_teachers(config: Config, prompts: Batch) -> None:
    """Holds `distillation.*` against the columns of the data.

    Raises:
        ConfigError: for a template with a column that rows have not, or a row without a teacher.
    """
    settings = config.distillation
    if settings is None:
        return
    known = list(prompts.columns)
    template = TeacherPrompt.read(settings.teacher_prompt)
    for name in template.columns if template else ():
        if name not in known:
            raise ConfigError(
                f"distillation.teacher_prompt={settings.teacher_prompt}: there is no column "
                f"`{name}` in the data; a row has "
                f"{', '.join(filter(is_of_data, known))}.{nearest(name, known)}"
            )
    if settings.by is not None and settings.by in known:
        rows_by_teacher(prompts[settings.by], settings.by, list(config.models))


def check_rubrics(config: Config, prompts: Batch) -> None:
    """Reads the criteria of judges, of a file and of every row.

    Raises:
        ConfigError: names the file, or the column that is not there.
        DataError: names the row.
    """
    for group, scores in ((Setting("reward"), config.reward), (Setting("cost"), config.cost)):
        judge = group / "judge"
        if scores is None or scores.judge.path is None:
            continue
        if scores.judge.rubric is not None:
            load_rubric(scores.judge.rubric, judge / "rubric")
        column = scores.judge.rubric_column
        if column is not None and "prompt" in prompts.columns:
            if column not in prompts.columns:
                raise ConfigError(
                    f"{judge / 'rubric_column'}={column}: there is no such column in the data; a "
                    f"row has {', '.join(filter(is_of_data, prompts.columns))}."
                )
            for prompt, given in zip(prompts["prompt"], prompts[column], strict=True):
                rubric_of({"prompt": prompt, column: given}, column, judge / "rubric_column")

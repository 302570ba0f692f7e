"""Names that error sentences have for rows of the data and for the settings they come from."""

from __future__ import annotations

from typing import NamedTuple

from hybridrl.config.setting import Setting


class RowOrigin(NamedTuple):
    """The settings by which rows are read, and what sentences call these rows.

    Attributes:
        settings: The name of the group: `data`, `data.sources.gsm8k`, `eval.sets.math.data`.
        rows: "the data", or what stands in its place.
        held_out: The setting of the number of rows to evaluate on.
        is_eval_path: The rows are those of `eval_path` of the group, not those of `path`.
    """

    settings: Setting = Setting("data")
    rows: str = "the data"
    held_out: Setting = Setting("eval.prompts")
    is_eval_path: bool = False

    def __truediv__(self, name: str) -> Setting:
        is_place = self.is_eval_path and name in ("path", "split")
        return self.settings / (f"eval_{name}" if is_place else name)


DATA = RowOrigin()
"""Rows of `data.path`, or of `data.task`."""


class DataRow(NamedTuple):
    """A row by its number, from 1; as text the beginning of a sentence about it."""

    number: int
    origin: RowOrigin = DATA

    def __str__(self) -> str:
        return f"Row {self.number} of {self.origin.rows}"

    def __truediv__(self, name: str) -> Setting:
        return self.origin / name

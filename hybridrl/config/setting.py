"""The names of settings, as sentences about their values have them."""

from __future__ import annotations


class Setting(str):
    """The dotted name under which a value, or a group of values, was given.

    What reads a group that stands under several names, such as `data` and `eval.sets.math.data`,
    takes its `Setting` beside the values and makes its sentences of that:
    `Setting("eval.sets.math.data") / "path"`.
    """

    __slots__ = ()

    def __truediv__(self, name: str) -> Setting:
        return Setting(f"{self}.{name}")

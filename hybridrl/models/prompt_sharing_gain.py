"""What sharing a prompt has to spare, by setting and model; updates and plans go by it."""

from __future__ import annotations

from typing import NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.prompt_trees import explain_unshareable


class LeastSaving(NamedTuple):
    """A least saving with which a prompt is shared. Attention of trees takes more operations, which
    a few tokens are not worth.

    Attributes:
        share: Of the tokens of the prompt's samples.
        tokens: How many of them at least.
    """

    share: float
    tokens: int

    def is_reached(self, spared: float, whole: float) -> bool:
        """Return whether sparing so many of the tokens of a prompt's samples is worth it."""
        return spared >= max(self.tokens, self.share * whole)


LEAST_SAVINGS = {"auto": LeastSaving(0.1, 64), "true": LeastSaving(0.0, 1)}
"""By the setting `actor.share_prefixes`. With 64 tokens the smallest models gain, too."""


def find_least_saving(setting: str, model: PackedModel) -> LeastSaving | None:
    """Return what sharing has to spare in a model; None: its samples share no prompts.

    Raises:
        ConfigError: if they are to, and cannot.
    """
    why = explain_unshareable(model)
    if setting == "true" and why:
        raise ConfigError(
            f"actor.share_prefixes=true: samples of {type(model.inner).__name__} cannot share a "
            f"prompt, because {why}. Set actor.share_prefixes=auto."
        )
    return None if why else LEAST_SAVINGS.get(setting)

"""What sharing a prompt has to spare, by setting and model; updates and plans go by it."""

from __future__ import annotations

from typing import NamedTuple

from hybridrl.errors import ConfigError
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.packed_samples import SampleLayout


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


def explain_unshareable(model: PackedModel) -> str | None:
    """Return why samples cannot share a prompt in a model, "it ..."; None if they can."""
    if model.rows is SampleLayout.PADDED:
        return "it hands on states from token to token besides attention"
    if window := _find_window(model):
        return f"its attention has windows of {window} tokens"
    return None


def _find_window(model: PackedModel) -> int | None:
    """Return how many tokens some layers' attention sees at most, None if all see everything.
    Some classes note it at their layers, others read it from the configuration."""
    text = model.inner.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    of_kinds = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    names = of_kinds.values() if kinds is None else map(of_kinds.get, kinds)
    windows = [getattr(text, name, None) for name in names if name is not None]
    windows += [getattr(module, "sliding_window", None) for module in model.inner.modules()]
    return next(filter(None, windows), None)

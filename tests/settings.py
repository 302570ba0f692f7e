"""Configurations for tests that need many."""

from collections.abc import Sequence
from functools import cache

from omegaconf import OmegaConf

from hybridrl.config.load import load_config, to_config
from hybridrl.config.presets import CHOSEN
from hybridrl.config.schema import Config


def configured(overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, but each choice of presets is composed only once."""
    chosen = tuple(o for o in overrides if o.partition("=")[0] in CHOSEN)
    others = [o for o in overrides if o not in chosen]
    base = OmegaConf.structured(_preset(chosen))
    return to_config(OmegaConf.merge(base, OmegaConf.from_dotlist(others)))


@cache
def _preset(chosen: tuple[str, ...]) -> Config:
    return load_config(chosen)

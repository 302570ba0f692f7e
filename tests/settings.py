"""Configurations for tests that need many."""

import pickle
from collections.abc import Sequence
from functools import cache

from omegaconf import DictConfig, OmegaConf

from hybridrl.composition.load import build_config
from hybridrl.config.presets import DEFAULT_PRESETS
from hybridrl.config.schema import Config
from hybridrl.job.config_resolution import load_config

TINY = ["model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"]
"""A model on which a step takes a tenth of a second."""
SHORT = [*TINY, "warmup.steps=3", "trainer.steps=2", "eval.prompts=16", "data.prompts_per_step=8"]
"""A job of seconds."""
LEARNS = [
    *("reward.function=length", "reward.options.length.limit=4", "reward.options.length.ramp=3"),
    "actor.optimizer.learning_rate=1e-2",
]
"""Short answers are better: learned from nothing in eight steps of a `SHORT` job."""


def configured(overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, but each choice of presets is composed only once."""
    chosen = tuple(o for o in overrides if o.partition("=")[0] in DEFAULT_PRESETS)
    others = [o for o in overrides if o not in chosen]
    settings: DictConfig = pickle.loads(_preset(chosen))
    settings.merge_with(OmegaConf.from_dotlist(others))
    return build_config(settings)


@cache
def _preset(chosen: tuple[str, ...]) -> bytes:
    """Pickled, which is copied in half the time."""
    return pickle.dumps(OmegaConf.structured(load_config(chosen)))

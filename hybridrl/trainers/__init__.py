"""Driver programs: the dataflow of each algorithm, one per file, and the loop around them.

`trainer.name=<module>` runs `hybridrl.trainers.<module>.Trainer`, so a new algorithm is a new file;
`trainer.name=path/to/file.py:Name` runs a class in a file of the user's.
"""

import importlib
import inspect
import pkgutil
from typing import Any

from hybridrl.core import user_code
from hybridrl.errors import ConfigError

PARTS = ("adaptive_kl", "base", "evaluation", "loop", "shaping", "step_metrics", "warmup")
"""Modules here that are not driver programs."""
PROGRAMS = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in PARTS]


def load_trainer(name: str) -> Any:
    """The class of the driver program called `name`.

    Raises:
        ConfigError: if there is none.
    """
    modules = {program: f"{__name__}.{program}" for program in PROGRAMS}
    found = user_code.named("trainer.name", name, modules)
    if name in modules:
        return importlib.import_module(found).Trainer
    from hybridrl.trainers.base import Trainer

    if not (inspect.isclass(found) and issubclass(found, Trainer)):
        raise ConfigError(
            f"trainer.name={name} is no subclass of hybridrl.trainers.base.Trainer, which says "
            "what a driver program has."
        )
    return found

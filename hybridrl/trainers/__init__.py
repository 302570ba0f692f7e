"""Driver programs: the dataflow of each algorithm, one per file, and the columns and roles that
they share.

`trainer.name=<module>` runs `hybridrl.trainers.<module>.Trainer`, so a new algorithm is a new file;
`trainer.name=path/to/file.py:Name` runs a class in a file of the user's, and `Job(trainer=Class)`
one that has no file.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError
from hybridrl.system import user_code

if TYPE_CHECKING:
    from hybridrl.config.schema import Config
    from hybridrl.trainers.role_spec import RoleSpec

PROGRAM_NAMES = [
    path.stem
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if "\nclass Trainer(" in path.read_text(encoding="utf-8") and path.stem != "trainer"
]
"""The driver programs here; other modules are what they are made of."""
_registered_classes: dict[str, Any] = {}
"""Classes that were given as objects, by the names they got in the settings."""


def register_program(trainer: type) -> str:
    """Register the class of a driver program and return the `trainer.name` that loads it in this
    process.

    Raises:
        ConfigError: if it is none.
    """
    name = f"{trainer.__module__}:{trainer.__qualname__}"
    _registered_classes[name] = _check_program(name, trainer)
    return name


def load_trainer(name: str) -> Any:
    """Return the class of the driver program called `name`.

    Raises:
        ConfigError: if there is none.
    """
    if name in _registered_classes:
        return _registered_classes[name]
    modules = {program: f"{__name__}.{program}" for program in PROGRAM_NAMES}
    found = user_code.resolve_user_object("trainer.name", name, modules)
    if name in modules:
        return importlib.import_module(found).Trainer
    return _check_program(name, found)


def load_roles(config: Config) -> dict[str, RoleSpec]:
    """Return the roles of the driver program that these settings name.

    Raises:
        ConfigError: if it describes them wrongly.
    """
    from hybridrl.trainers.role_spec import validate_roles

    name = config.trainer.name
    return validate_roles(load_trainer(name).roles(config), f"trainer.name={name}")


def _check_program(name: str, found: Any) -> Any:
    from hybridrl.trainers.trainer import Trainer

    if not (inspect.isclass(found) and issubclass(found, Trainer)):
        raise ConfigError(
            f"trainer.name={name} is no subclass of hybridrl.trainers.trainer.Trainer, which says "
            "what a driver program has."
        )
    return found

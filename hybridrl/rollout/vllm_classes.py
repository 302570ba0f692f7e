"""vLLM's classes of models whose files import torchvision, which text does not need.

The class of a model that also reads pictures imports the code that prepares these, and vLLM asks a
new process what each class can do. Where torchvision is not installed, as beside CPU builds of
torch, both fail. Here the class is imported in this process, with empty modules in torchvision's
place, and registered as it is. Importing this module needs vLLM.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers.utils import is_torchvision_available, is_torchvision_v2_available
from vllm import ModelRegistry

ABSENT = "torchvision"


def register_classes(architectures: Sequence[str]) -> None:
    """Has vLLM know these classes of its own without torchvision; does nothing where that is
    installed."""
    if importlib.util.find_spec(ABSENT) is not None:
        return
    is_torchvision_available(), is_torchvision_v2_available()  # they keep their answer, which is no
    for name in architectures:
        if name in ModelRegistry.models:
            with _empty_modules():
                found = ModelRegistry.models[name].load_model_cls()
            ModelRegistry.register_model(name, found)


@contextmanager
def _empty_modules() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == ABSENT]:
            del sys.modules[name]


class _Finder(MetaPathFinder, Loader):
    """Finds an empty module under every name of torchvision's."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != ABSENT:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _get_absent(thing: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


class _EmptyModule(ModuleType):
    __getattr__ = _get_absent


class _Absent(type):
    """A class whose attributes are such classes, for annotations and defaults."""

    __getattr__ = _get_absent

"""The program's process: it runs the program, and then does what the judge asks of it.

The program may change anything in here. That changes what it answers, and nothing else.
"""

from __future__ import annotations

import builtins
import io
import os
import sys

from .object_exchange import ObjectExchange

TYPE_CHECKING = False  # importing `typing` would take as long as all the rest
if TYPE_CHECKING:
    from typing import Any

_MOST_PRINTED = 1 << 20  # characters, in one call


class BoundedText(io.StringIO):
    """A text stream that keeps what is printed up to a limit and loses the rest."""

    def write(self, text: str) -> int:
        if self.tell() < _MOST_PRINTED:
            super().write(text[:_MOST_PRINTED])
        return len(text)


class ServedProgram(ObjectExchange):
    """The end that has the program's names."""

    def __init__(self, source: int, sink: int, names: dict[str, Any]) -> None:
        super().__init__(source, sink)
        self._names = names

    def perform(self, operation: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        if operation != "name":
            return super().perform(operation, arguments, options)
        found = self._names[arguments[0]]
        is_module = type(found) is type(sys)
        return [found.__name__ if is_module else found, is_module]

    def printed(self) -> str:
        text = sys.stdout.getvalue() if isinstance(sys.stdout, BoundedText) else ""
        sys.stdout = BoundedText()
        return text


def serve_program(program: str, source: int, sink: int) -> None:
    """Run the program as a module, send its names, and answer questions until the judge ends."""
    module = type(sys)("program")
    sys.modules["program"] = module  # where dataclasses and pickle look for its classes
    names = vars(module)
    end = ServedProgram(source, sink, names)
    sys.stdout = sys.stderr = BoundedText()
    originals = dict(vars(builtins))
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except BaseException:  # a SystemExit too: a program that ends before its tests fails them
        os._exit(1)
    sys.settrace(None)
    sys.setprofile(None)
    vars(builtins).update(originals)
    end.printed()
    end.send([str(name) for name in names])
    end.serve()
    os._exit(0)

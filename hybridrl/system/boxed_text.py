r"""The final answer of a solution in LaTeX: the text in its last `\boxed{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # with escapes, so that `\{` is passed over


def find_boxed_text(text: str, commands: Sequence[str] = ("\\boxed{",)) -> str | None:
    """Return the text in the last of these commands; None if there is none or it is not closed."""
    start, command = max((text.rfind(command), command) for command in commands)
    depth = 0
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and brace.group() == "}":
            return text[start + len(command) : brace.start()]
    return None

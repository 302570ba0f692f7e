"""Making text of models and data sets safe to print on a terminal."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

from hybridrl.system.redaction import redact

_GAP = " … "


def sanitize_line(text: str, cells: int) -> str:
    """Return `text` on one line of at most `cells` terminal cells, shortened in the middle if
    necessary.

    A new line becomes ⏎, a tab a space, and every other control character its visible picture
    (ESC becomes ␛), so that no escape sequence reaches the terminal. Characters that print nothing
    or turn the writing direction are dropped, and marks stacked on one letter are cut to two.
    """
    text = redact(text)
    if len(text) > 8 * cells:  # what is cut anyway need not be cleaned: answers can be megabytes
        clean = _replace_control_characters(text[: 4 * cells]) + _replace_control_characters(
            text[-4 * cells :]
        )
    else:
        clean = _replace_control_characters(text)
        if cell_len(clean) <= cells:
            return clean
    room = cells - cell_len(_GAP)
    if room < 4:
        return _truncate_to_cells(clean, cells)
    tail = _truncate_to_cells(clean[::-1], room // 2)[::-1]
    return _truncate_to_cells(clean, room - cell_len(tail)) + _GAP + tail


def sanitize_lines(text: str) -> str:
    """Return `text` with its line breaks, every line made safe as by `sanitize_line`."""
    return "\n".join(_replace_control_characters(line) for line in redact(text).splitlines())


def _replace_control_characters(text: str) -> str:
    kept: list[str] = []
    marks = 0
    for character in text.replace("\r\n", "\n"):
        category = unicodedata.category(character)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if character in "\n\r\u2028\u2029\x0b\x0c\x85":
            kept.append("⏎")
        elif character == "\t":
            kept.append(" ")
        elif character < " ":
            kept.append(chr(0x2400 + ord(character)))
        elif character == "\x7f":
            kept.append("␡")
        elif category in ("Cc", "Cs", "Co", "Cn"):
            kept.append("�")
        elif category != "Cf" and marks <= 2:
            kept.append(character)
    return "".join(kept)


def _truncate_to_cells(text: str, cells: int) -> str:
    """Return the longest beginning of `text` that fits in `cells` cells."""
    used = 0
    for index, character in enumerate(text):
        used += cell_len(character)
        if used > cells:
            return text[:index]
    return text

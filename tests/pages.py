"""What README.md and the pages of docs/ show: blocks of code, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("hybridrl", "python", "make")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


EXCERPT = re.compile(r"<!-- excerpt: (.+) -->$")


class Block(NamedTuple):
    """A block of code.

    Attributes:
        language: What stands behind its fence; of one that is only indented, `indented`.
        excerpt: Why it is not run, from the comment `<!-- excerpt: why -->` above its fence.
    """

    page: Path
    line: int
    language: str
    text: str
    excerpt: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """A command as a shell takes it, without comments."""

    page: Path
    line: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page, in order."""
    language, begin, held, previous, why = "", 0, [], "", ""
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), ""], 1):
        fence = line.startswith("```")
        indented = line.startswith("    ") or (language == "indented" and not line.strip())
        if language not in ("", "indented"):
            if not fence:
                held.append(line)
                continue
            yield Block(page, begin, language, "\n".join(held), why)
            language, held, why = "", [], ""
        elif indented and (language or not previous.strip()):
            if not language:
                language, begin = "indented", number
            held.append(line[4:])
        else:
            if language:
                yield Block(page, begin, language, "\n".join(held))
                language, held = "", []
            if fence:
                language, begin = line[3:].strip() or "none", number + 1
                why = found[1] if (found := EXCERPT.match(previous)) else ""
        previous = line


def commands(page: Path) -> Iterator[Command]:
    """Commands of the project in a page's blocks, and between single backquotes in its text, which
    may not go on in the next line."""
    for block in blocks(page):
        if block.language in ("text", "bash", "console"):
            whole = block.text.replace("\\\n", " " * 2)
            for offset, line in enumerate(whole.splitlines()):
                yield from _command(page, block.line + offset, line)
    text = page.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("    "):
            for span in INLINE.findall(line):
                yield from _command(page, number, span)


def _command(page: Path, number: int, line: str) -> Iterator[Command]:
    line = line.strip().removeprefix("$ ")
    program = line.split(" ")[0].removeprefix(".venv/bin/")
    if program not in PROGRAMS or " " not in line:
        return
    words = shlex.split(line.split(" && ")[0], comments=True)
    yield Command(page, number, (program, *words[1:]))


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Where each link of a page leads, but for other hosts."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced:
            for target in re.findall(r"\]\(([^)\s]+)\)", INLINE.sub("", line)):
                if "://" not in target:
                    yield number, target


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: headings as sites and code hosts both write them."""
    fenced, found = False, set()
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (heading := re.match(r"#+ (.+)", line)):
            words = re.sub(r"[^\w\s-]", "", heading[1].lower()).strip()
            found.add(re.sub(r"\s", "-", words))
    return found

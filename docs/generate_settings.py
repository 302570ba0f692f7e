"""Writes the tables of settings.md, from the schema and from the names of other libraries.

python docs/generate_settings.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from generate_migration import PAGES, table_row

from hybridrl.composition.aliases import foreign_settings
from hybridrl.composition.setting_names import list_settings
from hybridrl.config.schema import Config, EvalSetConfig
from hybridrl.config.setting_types import (
    describe_type,
    find_condition,
    find_default,
    is_optional,
    read_type_hints,
    strip_annotations,
)

PAGE = Path(__file__).parent / "settings.md"
BEGIN = "<!-- Written by docs/generate_settings.py from the schema. -->"
AGAIN = {"cost.judge": "reward.judge"}
"""Groups that are described as others."""
END = "<!-- End of what is written. -->"


def written(page: str) -> str:
    """The page with the tables as they are now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n\n".join([before + BEGIN, *sections(), END + after])


def sections() -> Iterator[str]:
    """A table for each group of settings, and one of other libraries' names."""
    yield f"{len(list_settings())} settings."
    for name, group, where in (*_groups(Config), ("eval.sets.<name>.", EvalSetConfig, "")):
        rows = [_row(f"{name}{key}", group, key) for key in _own(group)]
        if rows:
            title = f"## `{name.removesuffix('.')}`" if name else "## The job"
            head = "| setting | value | default | meaning |\n|---|---|---|---|"
            about = f"{_words(inspect.getdoc(group) or '')} {where}".strip()
            yield "\n".join([title, "", *([about, ""] if name else []), head, *rows])
    yield "## Coming from TRL, verl, OpenRLHF or NeMo-RL"
    yield (
        "The command line answers to other libraries' names with what they are called here, "
        "whatever group they stand in. [coming_from_trl.md](coming_from_trl.md) and "
        "[coming_from_verl.md](coming_from_verl.md) have those of TRL and verl; further ones are:"
    )
    rows = [table_row(row) for row in foreign_settings() if row.library not in PAGES]
    yield "\n".join(["| there | here | |", "|---|---|---|", *rows])


def _groups(group: Any, prefix: str = "", where: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every group of settings with its dotted name, and where it counts, outer ones first."""
    yield prefix, group, where
    for key, hint in read_type_hints(group).items():
        if is_dataclass(inner := strip_annotations(hint)) and f"{prefix}{key}" not in AGAIN:
            yield from _groups(inner, f"{prefix}{key}.", _where(hint, prefix))


def _own(group: Any) -> list[str]:
    """The settings of a group without those of groups in it. Those of a cost that rewards have,
    too, are described with them."""
    inherited = {
        key for base in group.__mro__[1:] if is_dataclass(base) for key in read_type_hints(base)
    }
    found = {
        key: strip_annotations(hint)
        for key, hint in read_type_hints(group).items()
        if key not in inherited
    }
    return [key for key, kind in found.items() if not is_dataclass(kind)]


def _row(name: str, group: Any, key: str) -> str:
    hint, default = read_type_hints(group)[key], find_default(group, key)
    value = describe_type(hint) + (", or null" if is_optional(hint) else "")
    value = value.replace("text, at most 255 bytes between two `/`", "a name, path or URL")
    meaning = _docstrings(group).get(key, "")
    meaning = f"{meaning} {_where(hint, name.rpartition('.')[0] + '.', name)}".strip()
    shown = yaml.safe_dump(default, default_flow_style=True).removesuffix("\n...\n").strip()
    return f"| `{name}` | {_cell(value)} | `{shown}` | {_cell(meaning)} |"


def _where(hint: Any, group: str, name: str = "") -> str:
    """The sentence that says with which other settings a setting of the group is used at all."""
    needed = (str(one).replace("`.", f"`{group}") for one in find_condition(hint))
    of_itself = re.compile(f"`{re.escape(name)}[`=]")
    said = " and ".join(one for one in needed if not of_itself.search(one))
    return f"Only used with {said}." if said else ""


@cache
def _docstrings(group: Any) -> dict[str, str]:
    """What stands below each field of a class."""
    body = ast.parse(inspect.getsource(group)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: _words(said.value.value)
        for field, said in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
    }


def _words(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """Without what would end a cell."""
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Writes the tables of coming_from_trl.md and coming_from_verl.md from other_libraries.yaml.

python docs/generate_migration.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from hybridrl.composition.aliases import AUTOMATIC, ForeignSetting, foreign_settings

FOLDER = Path(__file__).parent
PAGES = {"TRL": FOLDER / "coming_from_trl.md", "verl": FOLDER / "coming_from_verl.md"}
BEGIN = (
    "<!-- Written by docs/generate_migration.py from hybridrl/composition/other_libraries.yaml. -->"
)
END = "<!-- End of what is written. -->"


def written(page: str, library: str) -> str:
    """The page with the library's tables as they are now between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n\n".join([before + BEGIN, *sections(library), END + after])


def sections(library: str) -> list[str]:
    """A heading and a table for each part of the library's settings."""
    rows = [row for row in foreign_settings() if row.library == library]
    found = []
    for title, of_table in groupby(rows, key=lambda row: row.table):
        head = f"| {library} | here | |\n|---|---|---|"
        found.append("\n".join([f"## {title}", "", head, *map(table_row, of_table)]))
    return found


def table_row(row: ForeignSetting) -> str:
    """A row of a table in Markdown."""
    nothing = "nothing to set" if row.here == (AUTOMATIC,) else "none"
    here = ", ".join(f"`{setting}`" for setting in row.settings) or nothing
    renamed = {theirs: ours for theirs, ours in row.values.items() if theirs != ours}
    values = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in renamed.items())
    note = " ".join(filter(None, [row.note, f"{values}." if values else ""]))
    return f"| {', '.join(f'`{name}`' for name in row.names)} | {here} | {note} |"


if __name__ == "__main__":
    for library, path in PAGES.items():
        path.write_text(written(path.read_text(encoding="utf-8"), library), encoding="utf-8")

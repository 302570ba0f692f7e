"""Writes the tables of performance.md from figures.json, which has each figure with its commit.

python docs/generate_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE, FIGURES = FOLDER / "performance.md", FOLDER / "figures.json"
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"
COLUMNS = ("what", "figure", "goal", "date", "commit", "command")


def written(page: str) -> str:
    """The page with the table of each section between its marks."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))["figures"]
    for section in dict.fromkeys(figure["section"] for figure in figures):
        rows = [figure for figure in figures if figure["section"] == section]
        before, begin, rest = page.partition(BEGIN.format(section))
        _, end, after = rest.partition(END)
        assert begin and end, f"{PAGE.name} has no place for the figures of {section!r}"
        page = f"{before}{begin}\n\n{table(rows)}\n\n{end}{after}"
    return page


def table(rows: list[dict[str, str]]) -> str:
    """The figures as Markdown; a goal that none of them has is no column."""
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row, name) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: dict[str, str], name: str) -> str:
    return f"`{row[name]}`" if name in ("command", "commit") and row[name] else row[name]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

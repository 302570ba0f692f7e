"""Draws images/house.svg: the rooms of the library and who imports whom, from the table that
tests/unit/test_imports.py holds the code to.

python docs/draw_house.py

A room stands above those that it imports. Of arrows that follow from others only the others are
drawn: what `trainers` may import, `trainers` reaches through `evaluation`, too. Colours are such
that the picture can be read on light and on dark pages.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "unit" / "test_imports.py"
PICTURE = Path(__file__).parent / "images" / "house.svg"
FAMILIES = {
    "driver side": ("#00796b", {"trainers", "evaluation", "checks", "placement", "controller"}),
    "worker side": (
        "#3f51b5",
        {"workers", "engine", "rollout", "models", "parallel", "serving", "environments"},
    ),
    "data and files": (
        "#8d5a2b",
        {"data", "conversations", "rewards", "checkpoint", "compress", "layout", "weights"},
    ),
    "looking on": ("#7b3f8c", {"planner", "commands", "console", "run_files", "report"}),
    "everybody's": ("#546e7a", {"system", "algorithms", "config", "ray_backend"}),
}
WIDTH, HEIGHT, GAP, RISE = 128, 40, 22, 78
"""Of a room, between rooms of a floor, and from one floor to the next, in pixels."""


def rooms() -> dict[str, set[str]]:
    """Each room with the whole rooms that it may import."""
    tree = ast.parse(TABLE.read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and [getattr(name, "id", "") for name in node.targets] == ["MAY_IMPORT"]
    )
    assert isinstance(table, ast.Dict)
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        name = ast.literal_eval(key)
        if name and (ROOT / "hybridrl" / name).is_dir():
            said = {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}
            found[name] = {one for one in said if isinstance(one, str) and one[:1] not in "=*"}
    return {name: targets & found.keys() for name, targets in found.items()}


def direct(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        reached[name] = set(graph[name]).union(*(reached[one] for one in graph[name]))
    return {
        name: {one for one in targets if not any(one in reached[other] for other in targets)}
        for name, targets in graph.items()
    }


Stop = tuple[str, str, int]
"""Where the arrow from one room to another crosses the floor of this number."""


def places(graph: Mapping[str, set[str]]) -> dict[str | Stop, tuple[float, float]]:
    """The middle of each room, and where arrows cross floors between. A room's floor is one above
    the highest that it imports; its place there that of its neighbours in the floors beside it, as
    far as there is room."""
    floor: dict[str | Stop, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floor[name] = max((floor[one] + 1 for one in graph[name]), default=0)
    near: dict[str | Stop, set[str | Stop]] = {}
    for name, targets in graph.items():
        for target in targets:
            stops = [(name, target, n) for n in range(floor[name] - 1, floor[target], -1)]
            floor |= {stop: stop[2] for stop in stops}
            for one, other in pairwise([name, *stops, target]):
                near.setdefault(one, set()).add(other)
                near.setdefault(other, set()).add(one)
    floors = range(max(floor.values()) + 1)
    rows = [sorted((one for one in floor if floor[one] == n), key=str) for n in floors]
    width = max(sum(map(_room, row)) for row in rows)
    at = {one: x for row in rows for one, x in _spread(row, width).items()}
    for _ in range(60):
        for row in rows:
            pull = {one: mean(at[other] for other in near.get(one, {one})) for one in row}
            at |= _spread(sorted(row, key=pull.__getitem__), width)
    return {one: (at[one], (len(rows) - floor[one] - 0.5) * RISE) for one in floor}


def _room(one: str | Stop) -> int:
    return WIDTH + GAP if isinstance(one, str) else GAP


def _spread(row: list[str | Stop], width: float) -> dict[str | Stop, float]:
    """In this order, as far from each other as there is room."""
    more = (width - sum(map(_room, row))) / len(row)
    ends = list(accumulate(_room(one) + more for one in row))
    return {one: end - (_room(one) + more) / 2 for one, end in zip(row, ends, strict=True)}


def _arrow(points: list[tuple[float, float]]) -> str:
    """A curve that crosses floors upright."""
    (x, y), *rest = points
    drawn = [f"M{x:.0f} {y + HEIGHT / 2:.0f}"]
    y += HEIGHT / 2
    for place, (to_x, to_y) in enumerate(rest):
        last = place == len(rest) - 1
        end = to_y - HEIGHT / 2 - 2
        bend = (end - y) / 2
        drawn.append(f"C{x:.0f} {y + bend:.0f} {to_x:.0f} {end - bend:.0f} {to_x:.0f} {end:.0f}")
        if not last:
            drawn.append(f"V{to_y + HEIGHT / 2:.0f}")
        x, y = to_x, to_y + HEIGHT / 2
    return "".join(drawn)


def picture() -> str:
    """The SVG."""
    graph = direct(rooms())
    at = places(graph)
    colours = {name: colour for colour, names in FAMILIES.values() for name in names}
    width = max(x for x, _ in at.values()) + WIDTH / 2 + GAP / 2
    height = max(y for _, y in at.values()) + HEIGHT / 2 + 46
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="system-ui, sans-serif" font-size="15" text-anchor="middle">',
        "<title>The rooms of hybridrl. An arrow leads from a room to one that it imports.</title>",
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="#8a9499"/></marker></defs>',
        '<g fill="none" stroke="#8a9499" stroke-width="1.4" marker-end="url(#to)">',
    ]
    for name, targets in sorted(graph.items()):
        for target in sorted(targets):
            stops = sorted((one for one in at if one[:2] == (name, target)), key=lambda s: -s[2])
            lines.append(f'<path d="{_arrow([at[one] for one in (name, *stops, target)])}"/>')
    lines.append("</g>")
    for name in sorted(graph):
        x, y = at[name]
        lines.append(
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="7" fill="{colours.get(name, "#546e7a")}"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" fill="#fff">{name}</text>'
        )
    for place, (name, (colour, _)) in enumerate(FAMILIES.items()):
        x, y = width * (place + 0.5) / len(FAMILIES), height - 12
        lines.append(
            f'<rect x="{x - 64:.0f}" y="{y - 11:.0f}" width="12" height="12" rx="3" '
            f'fill="{colour}"/><text x="{x - 46:.0f}" y="{y:.0f}" fill="#7c878c" font-size="13" '
            f'text-anchor="start">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")

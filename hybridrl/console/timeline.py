"""What every device did in a step or a few, from the ranks' own records: a picture, and a trace
that chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.batch.call_record import Record
from hybridrl.console.phase_colors import PHASE_COLOURS, PHASES
from hybridrl.report.trace_events import Event, Slice, events_of
from hybridrl.run_files.strict_json import to_json
from hybridrl.system.storage import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_IDLE, _GREY = "#f1f1f4", "#5c5c66"
_CHARACTER = 0.0056  # width of a letter, as a share of the whole time


@dataclass(frozen=True)
class Bar:
    """A call on a device: seconds since the first call began, and the part of it in each phase."""

    device: int
    role: str
    rank: int
    method: str
    start: float
    end: float
    phases: Mapping[str, float]

    @property
    def phase(self) -> str:
        """What most of it was."""
        other = self.end - self.start - sum(self.phases.values())
        parts = {"other": other} | dict(self.phases)
        return max(parts, key=lambda name: parts[name])


def bars_of(records: Sequence[Record], devices_by_role: Mapping[str, Sequence[int]]) -> list[Bar]:
    """The calls that ran on devices, in the order of time.

    Args:
        records: One per call and rank; those of roles that are on no device are left out.
        devices_by_role: The devices of each role, in rank order.
    """
    on_devices = [r for r in records if r.rank < len(devices_by_role.get(r.role, ())) and r.end]
    begin = min((record.start for record in on_devices), default=0.0)
    bars = [
        Bar(
            devices_by_role[record.role][record.rank],
            record.role,
            record.rank,
            record.method,
            record.start - begin,
            record.end - begin,
            {name: s for name, s in record.phases.items() if name in PHASES and s > 0},
        )
        for record in on_devices
    ]
    return sorted(bars, key=lambda bar: (bar.start, bar.device))


def idle_shares(bars: Sequence[Bar]) -> dict[int, float]:
    """By device, the share of the whole time in which no call ran on it."""
    whole = max((bar.end for bar in bars), default=0.0)
    shares = {}
    for device in sorted({bar.device for bar in bars}):
        busy, until = 0.0, 0.0
        for bar in (bar for bar in bars if bar.device == device):
            busy += max(0.0, bar.end - max(bar.start, until))
            until = max(until, bar.end)
        shares[device] = 1 - busy / whole if whole else 0.0
    return shares


def draw_timeline(
    records: Sequence[Record],
    devices_by_role: Mapping[str, Sequence[int]],
    path: Path,
    title: str = "",
) -> None:
    """Writes the picture at `path` (.png), and the trace beside it (.json).

    Raises:
        StorageError: one of them cannot be written.
    """
    bars = bars_of(records, devices_by_role)
    with replacing(path.with_suffix(".json")) as part:
        part.write_text(to_json({"traceEvents": trace_events(bars)}), encoding="utf-8")
    _draw(bars, path, title)


def trace_events(bars: Sequence[Bar]) -> list[Event]:
    """In Chrome's trace format: a process for each device, a thread for each role on it."""
    return events_of(
        Slice(
            bar.device,
            bar.role,
            f"{bar.role}.{bar.method}",
            bar.phase,
            bar.start,
            bar.end,
            {"rank": bar.rank, **{f"{k} (s)": v for k, v in bar.phases.items()}},
        )
        for bar in bars
    )


def _draw(bars: Sequence[Bar], path: Path, title: str) -> None:
    # Not pyplot: it keeps figures and a back end for the whole process, which is the user's.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    devices = sorted({bar.device for bar in bars})
    whole = max((bar.end for bar in bars), default=1.0)
    height = 1.6 + 0.62 * max(1, len(devices))
    sides = {f"axes.spines.{side}": False for side in ("top", "right", "left")}
    with rc_context({"font.size": 10.5, **sides}):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        figure = Figure(figsize=(12, min(height, 40)), dpi=100, layout=layout, facecolor="white")
        panel = figure.subplots()
        idle = idle_shares(bars)
        for row, device in enumerate(devices):
            panel.broken_barh([(0, whole)], (row - 0.38, 0.76), facecolors=_IDLE)
            for bar in (bar for bar in bars if bar.device == device):
                _draw_bar(panel, bar, row, whole)
        panel.set_yticks(range(len(devices)), [f"device {d}\nidle {idle[d]:.0%}" for d in devices])
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(len(devices) - 0.4, -0.6)
        panel.set_xlim(0, whole)
        panel.set_xlabel("seconds")
        panel.set_title(title, loc="left", pad=26, fontweight="bold", fontsize=12.5)
        shown = [phase for phase in PHASES if any(_has(bar, phase) for bar in bars)]
        patches = [Patch(color=PHASE_COLOURS[phase], label=phase) for phase in shown]
        panel.legend(
            handles=[*patches, Patch(color=_IDLE, label="idle")],
            loc="lower left",
            bbox_to_anchor=(-0.005, 1.0),
            ncols=6,
            frameon=False,
            fontsize=9.5,
            handlelength=1.3,
        )
        with replacing(path) as part:
            figure.savefig(part, format="png")


def _draw_bar(panel: Axes, bar: Bar, row: int, whole: float) -> None:
    """A call; its phases take their shares of it, in the usual order."""
    low, tall, length = row - 0.38, 0.76, bar.end - bar.start
    seconds = {name: bar.phases.get(name, 0.0) for name in ("sync", "generate", "score", "train")}
    scale = min(1.0, length / total) if (total := sum(seconds.values())) else 1.0
    at = bar.start
    parts = [(name, s * scale) for name, s in seconds.items() if s > 0]
    parts.append(("other", max(0.0, length - sum(s for _, s in parts))))
    for name, part in parts:
        panel.broken_barh([(at, part)], (low, tall), facecolors=PHASE_COLOURS[name])
        at += part
    edge = {"facecolors": "none", "edgecolors": "white", "linewidth": 0.8}
    panel.broken_barh([(bar.start, length)], (low, tall), **edge)
    room = length / (whole * _CHARACTER) - 2
    names = (f"{bar.role}.{bar.method}", f"{bar.role}\n{bar.method}", bar.role)
    if fits := [n for n in names if max(map(len, n.split("\n"))) <= room]:
        middle = {"ha": "center", "va": "center"}
        panel.text(bar.start + length / 2, row, fits[0], fontsize=8.5, color="white", **middle)


def _has(bar: Bar, phase: str) -> bool:
    if phase == "other":
        return bar.end - bar.start - sum(bar.phases.values()) > 1e-4
    return phase in bar.phases

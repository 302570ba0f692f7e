"""Formatting of seconds and bytes for messages, tables and logs. `report/page/dom.js` formats them
alike (a test compares the two)."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Format seconds: 0.0424 -> '42.4 ms', 41 -> '41 s', 95 -> '1 min 35 s', 3725 -> '1 h 2
    min'."""
    if seconds <= 0:  # of an age: clocks of machines differ
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = int(seconds + 0.5)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_bytes(count: float) -> str:
    """Format bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 999.5 or unit == "TiB":
            break
        count /= 1024
    return f"{int(count + 0.5)} {unit}" if count >= 99.5 else f"{count:.3g} {unit}"


def format_gib(count: float) -> str:
    """Format bytes as a number of GiB without the unit: one decimal from 1 GiB on ('79.2'), below
    it two significant digits."""
    return f"{count / 2**30:.1f}" if count >= 2**30 else f"{count / 2**30:.2g}"

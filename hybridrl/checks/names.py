"""A setting whose value is one of some names."""

from __future__ import annotations

from collections.abc import Iterable

from hybridrl.errors import ConfigError, nearest


def one_of(setting: str, value: str, known: Iterable[str]) -> None:
    """Refuses a name that is not known; names the nearest."""
    known = list(known)
    if value not in known:
        raise ConfigError(
            f"{setting}={value}: must be one of {', '.join(known)}.{nearest(value, known)}"
        )

"""The user's folder of what was measured here, for later plans: `$XDG_CACHE_HOME/hybridrl`, or
`~/.cache/hybridrl`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cache_file(*parts: str) -> Path:
    """Where a file of the cache is, or would be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "hybridrl", *parts)


def write_cached(file: Path, text: str) -> bool:
    """Writes it whole or not at all; False where that cannot be done: plans measure again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(file)
        return True
    return False

"""Garbage collection, kept away from imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """For imports: torch, transformers and vLLM are 650,000 objects that stay as long as the
    process, and looking through them takes a fifth of the time of importing them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""A way to pause Python's garbage collection during imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside the block. For imports: torch, transformers and vLLM create
    650,000 objects that live as long as the process, and collecting among them takes a fifth of
    their import time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

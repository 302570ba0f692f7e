"""Failures of the operating system, whatever library tells of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How Rust ends the text of such a failure."""


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Raises an `OSError` in place of what libraries in Rust (safetensors, tokenizers) raise when a
    disk is full or may not be written to: an exception of their own, known by its text."""
    try:
        yield
    except Exception as error:
        found = _NUMBER.search(str(error))
        if isinstance(error, OSError) or found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error

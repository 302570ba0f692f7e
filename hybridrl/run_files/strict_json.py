"""JSON that every reader accepts: NaN and infinity, which JSON lacks, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hybridrl.system.redaction import redact


def to_json(value: Any, indent: int | None = None) -> str:
    """Renders `value`; numbers of NumPy and torch become plain, anything unknown its `str`,
    and secrets `***`."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        # A lone surrogate cannot be encoded; it would make the write fail later.
        return redact(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # one NumPy or torch number
        return _plain(value.item())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return _plain(str(value))

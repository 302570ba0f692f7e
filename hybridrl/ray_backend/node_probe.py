"""A probe of a node, before anything of this package is imported there.

Sent to the nodes by value, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path


def probe_node(
    packages: Mapping[str, Sequence[str]], paths: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the versions of packages, and the settings whose paths do not exist here."""
    missing = [setting for setting, path in paths.items() if not Path(path).exists()]
    return read_versions(packages), missing


def read_versions(packages: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the version of Python and of each package; "" for a package that is not installed.

    Args:
        packages: By the name that is imported, the names under which it may be installed.
    """
    return {"Python": platform.python_version()} | {
        package: _find_version(package, names) for package, names in packages.items()
    }


def _find_version(package: str, names: Sequence[str]) -> str:
    found = importlib.util.find_spec(package)
    if found is None:
        return ""
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version if package != "hybridrl" else f"{version} ({_hash_sources(found)})"
    return f"not installed ({_hash_sources(found)})"


def _hash_sources(found: importlib.machinery.ModuleSpec) -> str:
    """Hash the sources of a package, because two copies under development have the same version."""
    digest = hashlib.sha256()
    for folder in found.submodule_search_locations or []:
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return f"sources {digest.hexdigest()[:8]}"

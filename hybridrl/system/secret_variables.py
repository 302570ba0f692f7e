"""Environment variables that hold secrets of the job, which programs of others start without."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from hybridrl.system.redaction import is_secret_name, url_secrets

_MORE_NAMES = re.compile(
    r"RAY_.*|(.*_)?(PAT|TOKEN)|.*(PASSWORD|PASSWD|SECRET|CREDENTIAL|ACCESS_KEY).*", re.IGNORECASE
)
"""Of variables alone: those of Ray, and names that have that of a secret anywhere."""
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""In an address, with any characters, also such that end it in a sentence (`url_secrets`)."""


def without_secrets(variables: Mapping[str, str], passed: Collection[str]) -> dict[str, str]:
    """Return the variables that hold no secret by their names, or a URL with a password.

    Args:
        passed: Names, or patterns such as `WANDB_*`, that are kept all the same. So are proxies.
    """
    return {name: value for name, value in variables.items() if not _is_kept(name, value, passed)}


def passing_hint(failure: str, setting: str, passed: Collection[str]) -> str:
    """Return a line to follow a failure that names a variable of this process that was kept from
    the program: how to pass it on. Empty if it names none."""
    names = [name for name, value in os.environ.items() if _is_kept(name, value, passed)]
    if not (missing := [name for name in names if re.search(rf"\b{re.escape(name)}\b", failure)]):
        return ""
    listed = ", ".join(missing)
    said = f"{listed} is set for the job and kept from this program"
    return f"\n{said}: {setting}=[{listed}] passes it on."


def _is_kept(name: str, value: str, passed: Collection[str]) -> bool:
    is_secret = is_secret_name(name) or _MORE_NAMES.fullmatch(name) is not None
    is_address = bool(url_secrets(value)) or _PASSWORD.search(value) is not None
    has_secret = is_address and not name.lower().endswith("_proxy")
    return (is_secret or has_secret) and not any(fnmatchcase(name, known) for known in passed)

"""Check of the Hugging Face hub: the local cache, and whether the hub can be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok

_DEFAULT_ENDPOINT, _CONNECT_TIMEOUT_S = "https://huggingface.co", 3.0
_TRUE_VALUES = {"1", "ON", "YES", "TRUE"}


def check() -> Iterator[DoctorFinding]:
    """Yield findings on the models in the cache and on access to the hub."""
    cache = _find_cache_folder()
    models = sorted(path.name for path in cache.glob("models--*") if any(path.glob("snapshots/*")))
    held = f"{len(models)} model{'s' * (len(models) != 1)} in {cache}"
    top = next(one for one in (cache, *cache.parents) if one.is_dir())
    if not os.access(top, os.W_OK):
        yield report_note(
            "hub cache", f"{held}, where this user may not write", "export HF_HOME=..."
        )
    else:
        yield report_ok("hub cache", held)
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & {
        name for name, value in os.environ.items() if value.upper() in _TRUE_VALUES
    }
    if offline:
        yield report_note(
            "hub",
            f"is not asked ({', '.join(sorted(offline))}): models have to be in the cache, or "
            "folders",
            "Unset it to download.",
        )
    elif why := _explain_unreachable():
        yield report_note(
            "hub",
            f"cannot be reached: {why}",
            "Give models as folders, or bring them into the cache and set HF_HUB_OFFLINE=1.",
        )
    else:
        yield report_ok("hub", f"{_find_endpoint()} can be reached")


def _find_cache_folder() -> Path:
    """Return the hub's cache folder, resolved as `huggingface_hub` resolves it."""
    environment = os.environ
    home = environment.get("HF_HOME") or str(
        Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or f"{home}/hub").expanduser().absolute()


def _find_endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT


def _explain_unreachable() -> str:
    """Return why a connection to the hub fails; empty if it succeeds, or if a proxy is set, through
    which it is not tried."""
    if os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY"):
        return ""
    url = urlsplit(_find_endpoint())
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""

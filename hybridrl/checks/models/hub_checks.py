"""Models that are named, not given as folders."""

from __future__ import annotations

from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.system.hub_access import why_not_on_hub


def check_reachable(path: str, setting: str) -> None:
    """Asks the Hugging Face hub for a model that is no folder here, for at most some seconds.

    Raises:
        ConfigError: there is no such folder, and the hub has none of that name or cannot be
            asked; names `setting`.
    """
    if not Path(path).is_dir() and (why := why_not_on_hub(path, "model")) is not None:
        raise ConfigError(
            f"{setting}={path}: there is no such folder (seen from {Path.cwd()}), and the Hugging "
            f"Face hub {why}. Give the path of a folder, or put the model into the hub's cache on "
            "this machine (`hf download`)."
        )

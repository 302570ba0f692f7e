"""A check within seconds whether a model or dataset is available on the Hugging Face hub.

The hub's own clients try again for most of a minute before they say that there is no network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from hybridrl.system.daemon_threads import DaemonThreads

HUB_TIMEOUT_S = 5.0
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")


def may_be_hub_name(path: str) -> bool:
    """Return whether a path has the form of a hub name: `owner/name`, or of a data set
    `owner/name:configuration`."""
    return _HUB_NAME.fullmatch(path) is not None


def find_hub_problem(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return why a name is not available on the hub, as the end of a sentence whose subject is the
    hub; None if it is available, or in the hub's cache on this machine."""
    from huggingface_hub import constants
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except ValueError as error:
        return f"has no such names: {error}"
    cached = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if cached.is_dir():
        return None
    if constants.HF_HUB_OFFLINE:
        return "must not be asked for one of that name (HF_HUB_OFFLINE)"
    return _query_hub(name, kind)


def _query_hub(name: str, kind: str) -> str | None:
    def ask() -> str | None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            HfApi().repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT_S)
            return None
        except GatedRepoError:
            return "gives it only to accounts that it was granted to (`hf auth login`)"
        except RepositoryNotFoundError:
            return "has none of that name, or hides it from this account (`hf auth login`)"
        except Exception as error:  # of the network, of many kinds
            return f"cannot be reached ({type(error).__name__}: {error})"

    # In a thread: a resolver that hangs knows no time-out.
    try:
        return DaemonThreads().submit(ask).result(HUB_TIMEOUT_S)
    except TimeoutError:
        return f"has not answered within {HUB_TIMEOUT_S:g} s"

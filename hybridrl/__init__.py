"""HybridRL: reinforcement learning from human or verifiable feedback for language models.

One driver program states the dataflow; behind each call a group of workers trains or generates.
Importing this package is cheap: neither torch nor Ray nor vLLM is loaded before it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.config.load import load_config
    from hybridrl.core.batch import Batch
    from hybridrl.job import Job

__version__ = "0.1.0"
__all__ = ["Batch", "Job", "load_config"]

_HOMES = {
    "Batch": "hybridrl.core.batch",
    "Job": "hybridrl.job",
    "load_config": "hybridrl.config.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridrl' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)

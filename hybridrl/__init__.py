"""HybridRL: reinforcement learning from human or verifiable feedback for language models.

One driver program states the dataflow; behind each call a group of workers trains or generates.
Importing this package is cheap: neither torch nor Ray nor vLLM is loaded before it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch
    from hybridrl.batch.turn import Episode, Turn
    from hybridrl.job.config_resolution import load_config
    from hybridrl.job.job import Job

__version__ = "0.1.0"
__all__ = ["Batch", "Episode", "Job", "Turn", "load_config"]

_EXPORTS = {
    "Batch": "hybridrl.batch.batch",
    "Episode": "hybridrl.batch.turn",
    "Job": "hybridrl.job.job",
    "Turn": "hybridrl.batch.turn",
    "load_config": "hybridrl.job.config_resolution",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hybridrl' has no attribute '{name}'")
    return getattr(import_module(_EXPORTS[name]), name)

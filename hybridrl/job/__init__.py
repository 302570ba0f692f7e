"""From a configuration to a job: the settings settled, rows loaded, devices and workers in place.

`Job` is imported when it is first asked for, since the workers that it needs load torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridrl.job.job import Job

__all__ = ["Job"]


def __getattr__(name: str) -> Any:
    if name != "Job":
        raise AttributeError(f"module 'hybridrl.job' has no attribute '{name}'")
    from hybridrl.job.job import Job

    return Job

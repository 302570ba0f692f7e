"""Ray, imported with the settings that it reads only then."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from hybridrl.errors import MissingPackageError, pip_install

# Read by Ray when it is imported: a cluster that we start ourselves listens on loopback only.
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Without it Ray warns, of accelerators it does not find, on every start.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Whoever has lost the head of the cluster tries for so many seconds to reach it again; else, sixty.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
# The hosts are the job: they get no less of a busy machine than the driver.
os.environ.setdefault("RAY_worker_niceness", "0")

try:
    import ray as typed_ray
except ImportError as error:
    raise MissingPackageError(
        f"executor=ray needs Ray, which is not installed: {pip_install('ray')}. Or run without it, "
        "on one device: executor=inline rollout=transformers."
    ) from error

ray: Any = typed_ray
"""The package, whose annotations do not cover what actors are given as options."""
actor_method = typed_ray.method
CloudPickler = typed_ray.cloudpickle.Pickler


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the driver: in a terminal it reaches every process of the job."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)

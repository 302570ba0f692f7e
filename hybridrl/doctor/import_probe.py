"""A program that imports large libraries in a separate process and prints a line of JSON for each.

python -P import_probe.py torch transformers vllm

It stands alone, because it is run where `hybridrl` may not be installed. If it dies, the library
that has no line is the one that killed it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any


def _probe_torch() -> dict[str, Any]:
    """Return torch's build and the GPUs that it can use."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    devices = []
    for number in range(torch.cuda.device_count() if available else 0):
        free, total = torch.cuda.mem_get_info(number)
        major, minor = torch.cuda.get_device_capability(number)
        name = torch.cuda.get_device_name(number)
        devices.append({"name": name, "free": free, "total": total, "arch": f"sm_{major}{minor}"})
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "architectures": torch.cuda.get_arch_list() if available else [],
        "devices": devices,
        "said": " ".join(str(one.message) for one in said),
        "threads": torch.get_num_threads(),
    }


def _probe_transformers() -> dict[str, Any]:
    """Return transformers' version after importing its model base class, which imports optional
    packages such as torchvision."""
    import transformers
    from transformers import PreTrainedModel  # noqa: F401

    return {"version": transformers.__version__}


def _probe_vllm() -> dict[str, Any]:
    """Return vLLM's version and its device type."""
    import vllm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return {"version": vllm.__version__, "device": current_platform.device_type}


def _probe_ray() -> dict[str, Any]:
    """Return Ray's version after importing its native extension."""
    import ray

    return {"version": ray.__version__}


def main() -> None:
    """Probe the libraries named on the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for name in sys.argv[1:]:
        try:
            found = globals()[f"_probe_{name}"]()
        except BaseException as error:  # libraries raise whatever they like
            first = next(iter(str(error).splitlines()), "")
            found = {"error": f"{type(error).__name__}: {first}"}
        answers.write(json.dumps({"name": name} | found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

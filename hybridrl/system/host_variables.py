"""The environment of a host process on a GPU: the GPUs that it sees, its threads, its allocator.

Every host sees all GPUs that the job has on its node, in the order of hosts. Its place among them
is therefore the index of its own GPU, for torch, NCCL and vLLM alike, and the GPUs of its
neighbours have the same indices in every process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

THREADS, COMPILE_THREADS = "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
ALLOCATOR, OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_PCI_DEVICES, _THREADS_OF_PROCESS = Path("/sys/bus/pci/devices"), Path("/proc/self/task")


def derive_host_environment(
    gpus: Sequence[str], place: int, cores: int, gpus_of_node: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables to set in a host process.

    Args:
        gpus: The job's GPUs on this node, by the names that CUDA_VISIBLE_DEVICES takes.
        place: The index of the host's own GPU among them.
        cores: The number of cores that all hosts of the node share.
        gpus_of_node: The number of GPUs, also of other jobs, among which the cores are divided.
        given: The environment so far. A user's settings are kept, but Ray and vLLM set both
            numbers of threads to 1 unasked, and a 1 does not count.
    """
    # CUDA shows a process one MIG instance only, the first that is named.
    visible = [gpus[place]] if gpus[place].startswith("MIG-") else gpus
    threads = str(max(1, cores // max(gpus_of_node, len(gpus))))
    derived = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which Ray and NVML number GPUs
        THREADS: threads,
        COMPILE_THREADS: threads,
        # Micro-batches differ in length, which fragments memory in segments of fixed sizes.
        ALLOCATOR: "expandable_segments:True",
    }
    kept = {name for name, value in given.items() if value != "1" or "THREADS" not in name}
    if OLD_ALLOCATOR in kept:
        del derived[ALLOCATOR]
    found = {name: value for name, value in derived.items() if name not in kept}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible)} | found


def bind_to_nearby_cores(pci_address: str) -> None:
    """Restrict this process to the cores on the socket of a PCI device, so that host memory for its
    copies is allocated there. Does nothing where the system does not name these cores."""
    with contextlib.suppress(OSError, ValueError):
        near = parse_core_list((_PCI_DEVICES / pci_address / "local_cpulist").read_text())
        usable = near & os.sched_getaffinity(0)
        for thread in _THREADS_OF_PROCESS.iterdir() if usable else ():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), usable)


def parse_core_list(text: str) -> set[int]:
    """Parse a list of cores as Linux writes it: `0-3,8` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found

"""What differs between kinds of device, in one place. Nothing else asks for a device's name."""

from __future__ import annotations

from collections.abc import Callable

import torch

COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch.distributed back ends by kind of device; small CPU tensors travel by gloo everywhere."""


LOGITS_AT_A_TIME = {"cpu": 1 << 22}
"""Of tokens times vocabulary: as many as a processor's cache holds."""
LOGITS_OF_ACCELERATORS = 160 << 20
"""1,100 tokens of a vocabulary of 152,000, 4 GiB while training. Each time the whole output
embedding is read, and few tokens would not be worth it."""


def logits_at_a_time(kind: str) -> int:
    """How many logits a device of this kind is to compute before it goes on with others."""
    return LOGITS_AT_A_TIME.get(kind, LOGITS_OF_ACCELERATORS)


MESSAGE_BYTES = {"cpu": 32 << 20}
"""Memory for messages while weights change their layout. A processor does best with what stays in
its caches: 256 MiB take three times as long."""
MESSAGE_BYTES_OF_ACCELERATORS = 512 << 20
"""128 MiB each way and round: a megabyte for each of 128 ranks, below which links are not full,
and so few rounds that starting their collectives does not count."""


def message_bytes(kind: str) -> int:
    """How much memory to take for messages on a device of this kind."""
    return MESSAGE_BYTES.get(kind, MESSAGE_BYTES_OF_ACCELERATORS)


def make_current(kind: str, local_rank: int) -> torch.device:
    """Makes the device the current one of this process and returns it.

    Ray shows each host process only its own GPU, so the index is 0 unless several are visible.
    """
    if kind == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its queued work, so that a clock tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Gives cached blocks back to the device, for another role's allocator."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def host_memory(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes of the host's memory, to which the device can copy while others work."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it has been given to do up to now."""
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize

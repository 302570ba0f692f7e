"""The differences between kinds of device, in one place. No other code branches on a device's
name."""

from __future__ import annotations

import importlib.util
import math
import platform
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hybridrl.system.host_variables import bind_to_nearby_cores

COLLECTIVE_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""torch.distributed back ends by kind of device; small CPU tensors travel by gloo everywhere."""

_LOGITS_PER_CHUNK = {"cpu": 1 << 22}
"""Of tokens times vocabulary: as many as a processor's cache holds."""
_ACCELERATOR_LOGITS_PER_CHUNK = 160 << 20
"""1,100 tokens of a vocabulary of 152,000, 4 GiB while training. Each time the whole output
embedding is read, and few tokens would not be worth it."""

SMALL_MODEL_BYTES = 256 << 20
"""A float32 model below this is gathered in one piece, on all kinds: many small collectives cost
more than its memory."""

_BUCKET_BYTES = {"cpu": 32 << 20}
"""Memory for messages while weights change their layout. A processor does best with what stays in
its caches: 256 MiB take three times as long."""
_ACCELERATOR_BUCKET_BYTES = 512 << 20
"""128 MiB each way and round: a megabyte for each of 128 ranks, below which links are not full,
and so few rounds that starting their collectives does not count."""

MIN_BFLOAT16_PARAMETERS = {"cpu": 8_000_000}
"""Parameters. On a CPU with the instructions an update takes half of float32's time (seen at 4 to
34 million parameters); what is smaller has little to gain."""


VALUES_PER_CHUNK = {"cpu": 1 << 18}
"""Of a codec, which goes over its values many times: what a processor's caches hold with all that
is made of it."""
_ACCELERATOR_VALUES_PER_CHUNK = 1 << 26
"""A few hundred MiB at a time, and so few kernels that starting them does not count."""


def read_gpu_name_and_memory() -> tuple[str, float]:
    """Return the name of this process's current GPU and its memory in bytes."""
    properties = torch.cuda.get_device_properties()
    return properties.name, float(properties.total_memory)


def open_gpu(place: int) -> tuple[str, float]:
    """Make the GPU at this index the current one, keep to the cores near it, and return its name
    and memory."""
    set_current_device("cuda", place)
    found: Any = torch.cuda.get_device_properties()
    bind_to_nearby_cores(
        f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    )
    return read_gpu_name_and_memory()


def values_per_chunk(kind: str) -> int:
    """Return how many values a codec encodes in one chunk on a device of this kind."""
    return VALUES_PER_CHUNK.get(kind, _ACCELERATOR_VALUES_PER_CHUNK)


FLASH_WIDTHS = range(8, 257, 8)
"""Of heads, with which torch's flash attention of samples of any length runs."""


def has_varlen_attention(kind: str) -> bool:
    """Return whether torch has variable-length attention in half precision for such a device."""
    return kind != "cpu"


def fits_flash(query: torch.Tensor) -> bool:
    """Return whether their device has variable-length flash attention that takes queries like
    these, `[tokens, heads, width]`."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return has_varlen_attention(query.device.type) and is_half and query.shape[-1] in FLASH_WIDTHS


def read_compute_capability(device: torch.device) -> int:
    """Return the major number of an NVIDIA GPU's compute capability; 0 for other devices."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device)[0] if is_nvidia else 0


@cache
def has_triton(kind: str) -> bool:
    """Return whether Triton is installed and compiles kernels for devices of this kind."""
    return kind == "cuda" and importlib.util.find_spec("triton") is not None


def logits_per_chunk(kind: str) -> int:
    """Return how many logits (tokens times vocabulary) to compute in one chunk on a device of this
    kind."""
    return _LOGITS_PER_CHUNK.get(kind, _ACCELERATOR_LOGITS_PER_CHUNK)


def has_mm_out_dtype(kind: str) -> bool:
    """Return whether `torch.mm` of half-precision matrices can write float32 (`out_dtype`) on such
    a device without copying its operands."""
    return kind != "cpu"


@cache
def has_onednn_int8(kind: str) -> bool:
    """Return whether oneDNN's int8 kernels run on such a device and are correct. On x86 CPUs
    without VNNI they add pairs of products in 16 bits, which overflows for large values."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return kind == "cpu" and is_x86 and torch._C._has_mkldnn and _adds_products_in_32_bits()


def _adds_products_in_32_bits() -> bool:
    size, of_cpu = 64, torch.device("cpu")  # others may have set other defaults
    largest = torch.full((1, size), 127, dtype=torch.int8, device=of_cpu)
    weights = torch.ops.onednn.qlinear_prepack(largest.expand(size, -1).contiguous(), None)
    ones = torch.ones(size, dtype=torch.float32, device=of_cpu)
    zeros = torch.zeros(size, dtype=torch.int64, device=of_cpu)
    found = torch.ops.onednn.qlinear_pointwise(
        *(largest, 1.0, 0, weights, ones, zeros),
        *(None, 1.0, 0, torch.float32, "none", [], ""),
    )
    return bool((found == size * 127 * 127).all())


def has_any_size_int_mm(kind: str) -> bool:
    """Return whether `torch._int_mm` takes matrices of any size on such a device; CUDA needs
    multiples of 8 and more than 16 rows."""
    return kind == "cpu"


def min_bfloat16_parameters(kind: str) -> int | None:
    """Return the number of parameters from which a model gains by bfloat16 on such a device: 0 on
    accelerators, None on CPUs without bfloat16 instructions (this machine's CPU is queried)."""
    multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if kind == "cpu" and not multiplies:
        return None
    return MIN_BFLOAT16_PARAMETERS.get(kind, 0)


def default_bucket_bytes(kind: str) -> int:
    """Return the default size in bytes of the message buffers of a weight transfer on a device of
    this kind."""
    return _BUCKET_BYTES.get(kind, _ACCELERATOR_BUCKET_BYTES)


def set_current_device(kind: str, local_rank: int) -> torch.device:
    """Make the device the current one of this thread and return it.

    Args:
        local_rank: The place of this process among those of its node, which see each other's GPUs
            (see `host_variables`). One that sees a single GPU has that, whatever its place.
    """
    if kind == "cpu":
        return torch.device("cpu")
    index = local_rank if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def synchronize_device(device: torch.device) -> None:
    """Wait until the device has finished its queued work, so that timings are correct."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_cached_memory(device: torch.device) -> None:
    """Release cached memory blocks to the device, for another role's allocator."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host without waiting for the device's queued work."""
    pinned = tensor.pin_memory() if has_pinned_memory() and device.type != "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def allocate_host_memory(size: int, device: torch.device) -> torch.Tensor:
    """Allocate `size` bytes of host memory, pinned for accelerators so that copies to it do not
    block."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")


def round_pinned_bytes(size: float) -> float:
    """Return the bytes that torch's allocator of pinned memory takes for a tensor of this size: the
    next power of two."""
    return 2.0 ** math.ceil(math.log2(size)) if size else 0.0


def is_compile_worthwhile(kind: str) -> bool:
    """Return whether compiled layers are known to gain more on such a device than compiling
    costs."""
    return kind != "cpu"


def has_pinned_memory() -> bool:
    """Return whether an accelerator is available, for which copies in host memory should be
    pinned."""
    return torch.accelerator.is_available()


def record_event(device: torch.device) -> Callable[[], None]:
    """Record an event on the device's current stream and return a function that waits for it."""
    if device.type == "cpu":
        return lambda: None
    event = torch.Event(device)
    event.record()
    return event.synchronize


class SideStream:
    """A stream for copies beside the current one. Inside a `with` block, non-blocking copies run on
    it, concurrently with the work of the current stream. On CPUs everything runs in order.

    Args:
        device: Whose stream it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*raised)

    def wait_for_current(self) -> None:
        """Make later work on this stream wait for the work queued on the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def join(self) -> None:
        """Make later work on the current stream wait for the work queued on this stream so far."""
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)

    def reads(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that another stream allocated until this stream has read it
        (`Tensor.record_stream`)."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def finish(self) -> None:
        """Wait until all work on this stream is done."""
        if self._stream is not None:
            self._stream.synchronize()


class TimingEvent:
    """A timing event on the current stream; on CPUs the current time.

    Args:
        device: Whose stream it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds, self._event = 0.0, None
        if device.type == "cpu":
            self._seconds = time.perf_counter()
        else:
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()

    def since(self, earlier: TimingEvent) -> float:
        """Return the seconds between an earlier event of the same device and this one. Waits until
        both have happened."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        earlier._event.synchronize()
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000

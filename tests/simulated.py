"""An accelerator that is not there, and the ranks that are not there: in one process without memory
or a driver, the code of an accelerator runs as it would, and is watched.

Tensors on the device are torch's fake tensors: they have shapes and no values. Those of the host
are real. Process groups are torch's fake ones: collectives return at once and bring nothing. So it
is seen what a rank allocates, which collectives it calls, and where it waits for the device; not
how fast any of it is.

Registering a device cannot be undone: processes that import this module should do nothing else.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

KIND = "simulated"
aten = torch.ops.aten


class _Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        return self

    def wait(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Stream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, *_):
        pass

    def wait_event(self, *_):
        pass

    def record_event(self, *_):
        return _Event()

    def synchronize(self):
        pass


class _Module(_DummyBackendModule):
    """What `torch.cuda` is to a GPU."""

    Stream, Event = _Stream, _Event

    def current_stream(self, *_):
        return _Stream()

    def stream(self, _):
        return contextlib.nullcontext()

    def set_stream(self, _):
        pass

    def device(self, _):
        return contextlib.nullcontext()

    def set_device(self, _):
        pass

    def synchronize(self, *_):
        pass

    def empty_cache(self):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_):
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_):
        pass


_setup_privateuseone_for_python_backend(KIND, _Module())
torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None
torch.accelerator.current_stream = lambda *_: _Stream()
DEVICE = torch.device(KIND, 0)


def join_as(rank: int, world_size: int) -> None:
    """Makes this process one rank of many, of which no other is there."""
    if KIND not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append(KIND)
    backend = f"cpu:fake,{KIND}:fake"
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=FakeStore())


@dataclass
class Phase:
    """What was seen of a rank while it did one thing.

    Attributes:
        before, peak, after: Bytes of the device's memory.
        collectives: Calls and bytes of each, by its name and the ranks that take part. The bytes
            are of the larger of what goes in and what comes out.
        host_collectives: As many, of the host's tensors.
        waits: How often the host waited for a number of the device.
    """

    before: int
    peak: int = 0
    after: int = 0
    collectives: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    host_collectives: Counter[str] = field(default_factory=Counter)
    waits: int = 0


class Accelerator(TorchDispatchMode):
    """Inside, what is made on `DEVICE` or from it is fake, and is counted.

    Args:
        spy: Bytes of a phase's peak, from an earlier run: `held` then tells what lives when so much
            is reached for the first time.
    """

    def __init__(self, spy: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.phases: dict[str, Phase] = {}
        self.held: Counter[str] = Counter()
        self._spy, self._fake = spy, FakeTensorMode()
        self._live, self._counts = 0, True
        self._storages: dict[int, tuple[weakref.ref, int, str]] = {}
        self._phase, self._name = Phase(0), ""

    def __enter__(self):
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int):
            found = resize(storage, size)
            if storage._cdata in self._storages:  # FSDP frees and takes what it gathers into so
                self._count(storage, "gathered")
            return found

        propagate = self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagated(*arguments, **keywords):
            self._counts = False  # DTensor asks for shapes, of the whole
            try:
                return propagate(*arguments, **keywords)
            finally:
                self._counts = True

        torch.UntypedStorage.resize_ = resized
        ShardingPropagator._propagate_tensor_meta_non_cached = propagated
        return super().__enter__()

    def __exit__(self, *arguments):
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate
        return super().__exit__(*arguments)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Counts what happens inside as one phase of the job."""
        self._phase, self._name = Phase(self._live, self._live), name
        self.phases[name] = self._phase
        yield self._phase
        self._phase.after = self._live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor comes back with what it holds
        if func.overloadpacket in (aten.pin_memory, aten._pin_memory):
            return args[0]  # the host's memory is as it is
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if func.namespace == "c10d":
            self._note(func, leaves, tensors)
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == KIND
        if not on_device and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._phase.waits += 1
            return 1  # a finite norm, a condition that holds
        if (
            func is aten._to_copy.default
            and device is not None
            and torch.device(device).type == "cpu"
            and tensors[0].device.type == KIND
        ):
            self._phase.waits += not kwargs.get("non_blocking")
            kind = kwargs.get("dtype") or tensors[0].dtype
            came = getattr(tensors[0], "came_from", None)  # which is known, as bounds of samples
            return torch.ones(tensors[0].shape, dtype=kind) if came is None else came.to(kind)
        args, kwargs = tree_map(self._faked, (args, kwargs))
        with self._fake:
            made = func(*args, **kwargs)
        if self._counts and not func.is_view:
            for tensor in tree_leaves(made):
                if isinstance(tensor, FakeTensor) and tensor.device.type == KIND:
                    self._count(tensor.untyped_storage(), str(func))
        if func is aten._to_copy.default and not isinstance(came := leaves[0], FakeTensor):
            made.came_from = came
        return made

    def _faked(self, value):
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake.from_tensor(value) if is_real else value

    def _count(self, storage: torch.UntypedStorage, why: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        else:
            reference, before, first = known
            why = first if before else why
            self._live -= before
        self._storages[key] = reference, size, why
        self._live += size
        if self._live > self._phase.peak:
            self._phase.peak = self._live
            if self._spy is not None and (self._name, self._live) == self._spy and not self.held:
                for _, held, what in self._storages.values():
                    self.held[f"{what} of {held / 2**20:.1f} MiB"] += held

    def _forget(self, key: int) -> None:
        _, size, _ = self._storages.pop(key)
        self._live -= size

    def _note(self, func, leaves, tensors) -> None:
        name = func._opname.strip("_").removesuffix("_base")
        group = next((x for x in leaves if isinstance(x, torch.ScriptObject)), None)
        ranks = dist.ProcessGroup.unbox(group).size() if group is not None else 0
        if tensors[0].device.type != KIND:
            self._phase.host_collectives[name] += 1
            return
        found = self._phase.collectives[f"{name} of {ranks}"]
        found[0] += 1
        found[1] += max(tensor.nbytes for tensor in tensors)

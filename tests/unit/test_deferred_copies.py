"""Copies that do not block, as an accelerator makes them: memory at once, values later."""

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, make_engine
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.engine import train_engine
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (3, 2), (5, 4), (6, 5), (7, 6)])
def test_a_model_that_makes_room_keeps_its_weights(process_group, monkeypatch, ranks, rank):
    """FSDP pads shards that are uneven on the host, as soon as it has them there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    engine = make_engine(ParallelMesh.data_parallel(CPU, ranks))
    engine._offloads_all = True
    before = {name: part.clone() for name, part in engine.local_parameters().items()}
    under_way = []
    to = torch.Tensor.to

    def deferred(tensor, *arguments, **keywords):
        made = to(tensor, *arguments, **keywords)
        if not any(argument is True for argument in (*arguments, keywords.get("non_blocking"))):
            return made
        made = made.clone()
        part = made.to_local() if isinstance(made, DTensor) else made
        under_way.append((part, part.detach().clone()))
        part.detach().fill_(torch.nan)
        return made

    def synchronize(device):
        while under_way:
            part, values = under_way.pop()
            part.detach().copy_(values)

    monkeypatch.setattr(torch.Tensor, "to", deferred)
    monkeypatch.setattr(train_engine, "synchronize_device", synchronize)
    engine.offload()
    assert not under_way
    after = engine.local_parameters()
    assert before and all(torch.equal(after[name], part) for name, part in before.items())

"""What FSDP gathers together, and that nothing stays gathered."""

import pytest
import torch
from engine_cases import TEMPERATURE, make_batch
from parallel_cases import make_engine, make_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridrl.parallel import fsdp
from hybridrl.parallel.fsdp import list_fsdp_units

LAYERS = 2


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_gathered_for_themselves_unless_they_are_one(
    mesh, monkeypatch, tied
):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    engine = make_engine(mesh, make_model(tied=tied))
    inner = engine.model.inner
    ends = (inner.get_input_embeddings(), inner.get_output_embeddings())
    assert [isinstance(end, FSDPModule) for end in ends] == [not tied] * 2
    assert len(list_fsdp_units(engine.model)) == 1 + LAYERS + (0 if tied else 2)


@pytest.mark.parametrize("small", [True, False])
def test_scoring_leaves_nothing_gathered(mesh, monkeypatch, small):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 1 << 20 if small else 0)
    engine = make_engine(mesh, make_model(tied=False), tokens_per_microbatch=60)
    batch = make_batch()
    scored = engine.forward(batch, temperature=TEMPERATURE)
    assert all(isinstance(p, DTensor) for p in engine.model.parameters()), "sharded again"
    again = engine.forward(batch, temperature=TEMPERATURE)
    assert torch.equal(scored["log_probs"].values, again["log_probs"].values)

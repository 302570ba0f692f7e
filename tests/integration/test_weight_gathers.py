"""Real gloo: weights that are gathered as 4-bit differences, on two and four ranks."""

from dataclasses import replace

import pytest
import torch
from engine_cases import (
    CLIPPED,
    CPU,
    DEALS,
    LEARNING,
    LONGEST,
    TEMPERATURE,
    deal,
    make_batch,
    make_engine,
    parameters,
)
from ranks import run_ranks

from hybridrl.checkpoint.engine_state.training_state import load_training_state, save_training_state
from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel import fsdp
from hybridrl.parallel.compressed_collectives import (
    DIFFERENCE_CODEC,
    DifferenceAllGather,
    apply_encoded_difference,
)
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

WORLD, UPDATES, SAVED = 4, 4, 1
# Name: ranks, `parallel.shards`, precision of computation, and whether the model is one unit.
ARMS = {
    "two ranks": (2, None, "float32", True),
    "units in bfloat16": (WORLD, None, "bfloat16", False),
    "copies of shards": (WORLD, 2, "float32", True),
}


def an_engine(arm, weights, mesh):
    _, shards, dtype, _ = ARMS[arm]
    settings = ParallelConfig(shards=shards, weights=weights)
    calm = replace(LEARNING, learning_rate=0.003)
    return make_engine(mesh, dtype, calm, parallel=settings, tokens_per_microbatch=LONGEST)


def held(engine):
    return [gather._held.clone() for gather in engine._gathers]


def exact(engine):
    """What the copies would be if they were gathered now."""
    engine.gather_anew()
    engine.forward(make_batch(), temperature=TEMPERATURE)
    return held(engine)


def program_of(arm, rank, folder, sent):
    ranks, shards, _, is_small = ARMS[arm]
    mesh = ParallelMesh(RankMesh({"dp": ranks}), CPU, shards)
    if rank >= ranks:
        return None
    fsdp.SMALL_MODEL_BYTES = 1 << 20 if is_small else 0
    rows = make_batch().take(deal(make_batch(), DEALS[ranks][0])[rank])
    ours, full = (an_engine(arm, kind, mesh) for kind in ("int4_difference", "full"))
    found = {"units": len(ours._gathers), "sent": [], "full": len(full._gathers)}
    for update in range(UPDATES):
        if update == UPDATES - 1:
            before = held(ours)
        for engine in (ours, full):
            engine.update(rows, CLIPPED, temperature=TEMPERATURE)
        if update == SAVED:
            save_training_state(ours, folder / arm)
        at = len(sent)
        for _ in range(2):  # several micro-batches each, and two more gathers in the update
            scored = ours.forward(rows, temperature=TEMPERATURE)
        found["sent"].append(len(sent) - at)
    found["scored"] = scored["log_probs"].values
    found["held"], found["parameters"] = held(ours), [parameters(ours), parameters(full)]
    again = an_engine(arm, "int4_difference", mesh)
    load_training_state(again, folder / arm)
    for _ in range(SAVED + 1, UPDATES):
        again.update(rows, CLIPPED, temperature=TEMPERATURE)
    found["resumed"] = parameters(again).equal(parameters(ours))
    found["exact"] = exact(ours)
    found["step"] = [one - two for one, two in zip(found["exact"], before, strict=True)]
    if rank == 0:
        next(iter(ours.local_parameters().values())).view(-1)[0] = torch.nan
    for gather in ours._gathers:
        gather.weights_stepped()
    ours.forward(rows, temperature=TEMPERATURE)
    found["spoilt"] = held(ours)
    return found


def rank_program(rank, folder):
    sent, send = [], DifferenceAllGather._send_differences

    def noted(self, *given):
        sent.append(self)
        send(self, *given)

    DifferenceAllGather._send_differences = noted
    return {arm: program_of(arm, rank, folder, sent) for arm in ARMS}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(rank_program, folder, WORLD, folder)


@pytest.mark.parametrize("arm", ARMS)
def test_every_rank_holds_the_same_bits(found, arm):
    ranks = ARMS[arm][0]
    for rank in range(1, ranks):
        for ours, first in zip(found[rank][arm]["held"], found[0][arm]["held"], strict=True):
            assert torch.equal(ours, first)
        assert torch.equal(found[rank][arm]["parameters"][0], found[0][arm]["parameters"][0])


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_lost_does_not_add_up(found, arm):
    """The copy is as far from the weights as 4 bits lose of one update, however many there were."""
    for ours, exact, step in zip(
        *(found[0][arm][n] for n in ("held", "exact", "step")), strict=True
    ):
        off = float((ours.float() - exact.float()).norm())
        assert 0 < off <= 0.25 * float(step.float().norm())


@pytest.mark.parametrize("arm", ARMS)
def test_only_the_first_gather_after_an_update_sends(found, arm):
    one = found[0][arm]
    assert one["full"] == 0
    assert one["units"] == (1 if ARMS[arm][3] else 3)
    anew = [update == SAVED for update in range(UPDATES)]  # after a checkpoint, in full
    assert one["sent"] == [0 if full else one["units"] for full in anew]


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_learned_is_nearly_what_is_learned_in_full(found, arm):
    ours, full = found[0][arm]["parameters"]
    assert 0 < float((ours - full).norm()) <= 0.02 * float(full.norm())


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_made_it(found, arm):
    assert all(one[arm]["resumed"] for one in found[: ARMS[arm][0]])


@pytest.mark.parametrize("arm", ARMS)
def test_a_weight_that_is_no_number_arrives_everywhere(found, arm):
    ranks, shards, *_ = ARMS[arm]
    for one in found[: shards or ranks]:
        assert any(held.isnan().any() for held in one[arm]["spoilt"])


def test_a_difference_is_added_in_float32_and_rounded_once():
    torch.manual_seed(0)
    held = torch.randn(1000, dtype=torch.bfloat16)
    wanted = (held.float() + 0.01 * torch.randn(1000)).bfloat16()
    encoded = DIFFERENCE_CODEC.encode(wanted.float() - held)
    expected = (held.float() + DIFFERENCE_CODEC.decode(encoded, 1000, torch.float32)).bfloat16()
    for _ in range(8):
        apply_encoded_difference(held, DIFFERENCE_CODEC.encode(wanted.float() - held))
        if expected is not None:
            assert torch.equal(held, expected)
            expected = None
    assert torch.equal(held, wanted)  # all that was lost has come


def test_bytes_between_ranks_are_as_few_as_promised():
    assert 2 * 1_000_000 / DIFFERENCE_CODEC.size(1_000_000) >= 3.9

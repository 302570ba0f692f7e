"""Real gloo ranks bring weights from training to generation, in the paper's three ways."""

from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from layout_cases import cut, empty_tensors, local, numbered
from ranks import run_ranks
from reshard_prediction import count
from weight_transitions import (
    HybridMesh,
    Parameter,
    VanillaMesh,
    gather_all,
    nested,
    vanilla,
)

from hybridrl.layout.boxes import Piece
from hybridrl.layout.tensor_layout import TransferTraffic, make_tensor_sink
from hybridrl.weights.collective_reshard import CollectiveReshard

WORLD = 8
ARMS = {
    "nested": (nested, HybridMesh),
    "vanilla": (vanilla, VanillaMesh),
    "gather_all": (gather_all, VanillaMesh),
}
CHANGES = [
    {"pp": 1, "tp": 4, "dp": 2, "rollout_pp": 1, "rollout_tp": 2},
    {"pp": 2, "tp": 2, "dp": 2, "rollout_pp": 1, "rollout_tp": 2},
    {"pp": 1, "tp": 4, "dp": 1, "rollout_pp": 1, "rollout_tp": 1},
    {"pp": 1, "tp": 2, "dp": 2, "rollout_pp": 1, "rollout_tp": 1},
]
"""1-4-2 -> 1-2-2-2, 2-2-2 -> 1-2-2-2, 1-4-1 -> 1-1-4-1, 1-2-2 -> 1-1-2-2."""
LAYERS = 4
BUCKET = 24 << 10


def model(pp):
    """A column-cut and a row-cut matrix and a norm per layer; embedding and head at the ends."""
    parameters = {"embed": Parameter((96, 32), 0), "head": Parameter((96, 32), 0, pp - 1)}
    for layer in range(LAYERS):
        stage = layer * pp // LAYERS
        parameters[f"{layer}.up"] = Parameter((128, 32), 0, stage)
        parameters[f"{layer}.down"] = Parameter((32, 128), 1, stage)
    return parameters


def with_norms(parameters):
    """The same with vectors that tensor parallelism does not cut: no formula knows of them."""
    norms = {f"{name}.norm": Parameter((32,), None, p.stage) for name, p in parameters.items()}
    return parameters | norms


def views(layout, rank, gathered, tensors):
    """The local tensors of a layout inside those of another one, where everything is."""
    found = {}
    for name, pieces in layout.pieces[rank].items():
        for piece in pieces:
            ((box, tensor, start),) = gathered.pieces[rank][name]
            place = Piece(box, tensor, start).at(piece.box)
            found[piece.tensor] = local(tensors[tensor], Piece(piece.box, *place))
    return found


def holds(layout, rank, tensors, values):
    """Whether the local tensors are what the layout says."""
    return all(
        torch.equal(local(tensors[piece.tensor], piece), cut(values[name], piece.box).to(dtype))
        for name, pieces in layout.pieces[rank].items()
        for piece in pieces
        for dtype in [tensors[piece.tensor].dtype]
    )


def run_arm(arm, sizes, rank, group):
    """One transition whose training shards are parts of the tensors that it fills."""
    make, mesh = ARMS[arm]
    transition = make(mesh(**sizes), model(sizes["pp"]))
    values = numbered(transition.training)
    tensors = empty_tensors(transition.gathered, rank)
    training = views(transition.training, rank, transition.gathered, tensors)
    for name, pieces in transition.training.pieces[rank].items():
        for piece in pieces:
            training[piece.tensor].copy_(cut(values[name], piece.box))
    plan = transition.gather()
    device = torch.device("cpu")
    bring = CollectiveReshard(plan, torch.float32, device, group, BUCKET)
    traffic = bring(training.__getitem__, make_tensor_sink(tensors))
    complete = holds(transition.gathered, rank, tensors, values)
    kept = views(transition.generation, rank, transition.gathered, tensors)
    complete &= holds(transition.generation, rank, kept, values)
    # Once more, with other weights: a plan is made once and executed after every update.
    for tensor in training.values():
        tensor.neg_()
    again = bring(training.__getitem__, make_tensor_sink(tensors))
    negative = {name: -value for name, value in values.items()}
    complete &= holds(transition.gathered, rank, tensors, negative)
    return {
        "complete": complete and again == traffic,
        "traffic": asdict(traffic),
        "counted": asdict(count(plan, torch.float32, BUCKET)[rank]),
        "parameters": sum(tensor.nbytes for tensor in tensors.values()),
        "redundant": transition.redundant()[rank] * 4,
    }


def run_cast(sizes, rank, group):
    """float32 training tensors of their own into bfloat16 ones."""
    transition = nested(HybridMesh(**sizes), with_norms(model(sizes["pp"])))
    values = {name: value / 7 for name, value in numbered(transition.training).items()}
    training = {
        piece.tensor: cut(values[name], piece.box).clone().requires_grad_()
        for name, pieces in transition.training.pieces[rank].items()
        for piece in pieces
    }
    tensors = empty_tensors(transition.generation, rank)
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    plan = transition.gather()
    settings = {"group": group, "bucket_bytes": BUCKET}
    bring = CollectiveReshard(plan, torch.bfloat16, torch.device("cpu"), **settings)
    traffic = bring(training.__getitem__, make_tensor_sink(tensors))
    return {
        "complete": holds(transition.generation, rank, tensors, values),
        "traffic": asdict(traffic),
        "counted": asdict(count(plan, torch.bfloat16, BUCKET)[rank]),
    }


def rank_program(rank):
    """What each of eight processes does and finds; tests compare."""
    half = dist.new_group(list(range(WORLD // 2)))
    found = {}
    for i, sizes in enumerate(CHANGES):
        ranks = HybridMesh(**sizes).size
        if rank < ranks:
            group = None if ranks == WORLD else half
            found[i] = {arm: run_arm(arm, sizes, rank, group) for arm in ARMS}
            found[i]["cast"] = run_cast(sizes, rank, group)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of eight processes found."""
    return run_ranks(rank_program, tmp_path_factory.mktemp("ranks"), WORLD)


def model_bytes(sizes):
    return sum(p.shape[0] * p.shape[1] for p in model(sizes["pp"]).values()) * 4


def formulas(arm, pp, tp, dp, rollout_pp, rollout_tp):
    """(received, peak, redundant at most) as parts of the model: Table 2 of the paper."""
    training, generation = pp * tp, rollout_pp * rollout_tp
    if arm == "nested":
        return (training - generation) / (generation * training), 1 / generation, 0
    parts = training if arm == "vanilla" else training * dp
    return (parts - 1) / parts, 1, 1 / parts


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_counted_bytes_equal_the_formulas(change, arm, ranks):
    sizes = CHANGES[change]
    received, peak, redundant = (part * model_bytes(sizes) for part in formulas(arm, **sizes))
    of_ranks = [ranks[rank][change][arm] for rank in range(HybridMesh(**sizes).size)]
    for found in of_ranks:
        assert found["complete"]
        assert found["traffic"] == found["counted"]
        traffic = TransferTraffic(**found["traffic"])
        assert traffic.received == pytest.approx(received, rel=0.01)
        assert traffic.sent == pytest.approx(received, rel=0.01)
        assert traffic.rounds > 1
        assert traffic.buffer <= BUCKET
        assert found["parameters"] <= peak * 1.02
    assert max(found["redundant"] for found in of_ranks) <= redundant


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_values_are_cast_by_those_who_send(change, ranks):
    for rank in range(HybridMesh(**CHANGES[change]).size):
        found = ranks[rank][change]["cast"]
        wide = ranks[rank][change]["nested"]["traffic"]
        assert found["complete"]
        assert found["traffic"] == found["counted"]
        assert found["traffic"]["received"] == pytest.approx(wide["received"] / 2, rel=0.05)
        assert found["traffic"]["buffer"] <= BUCKET

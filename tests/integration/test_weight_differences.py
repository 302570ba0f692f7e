"""Two ranks train, three generate: what changed travels, and both sides have the same then."""

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, make_model
from layout_cases import cut
from ranks import run_ranks
from test_weights_as_parcels import Part

from hybridrl.config.schema import ActorConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import RolloutError
from hybridrl.layout.boxes import box_numel, box_shape
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.weights.weight_channel import WeightChannel
from hybridrl.weights.weight_message import compute_checksum

TRAINERS, GENERATORS = 2, 3
SYNCS = 4
LOSSY = ("int8", "int4_delta")


class Link:
    """Stands in for `torch.distributed.all_to_all_single`: counts and damages what leaves."""

    def __init__(self, times):
        self.real, self.times, self.bytes = dist.all_to_all_single, times, 0

    def __call__(self, output, sent, *sizes, **options):
        if sent.dtype == torch.uint8:
            self.bytes += len(sent)
            if len(sent) and self.times:
                sent[len(sent) // 2] ^= 4
                self.times -= 1
        return self.real(output, sent, *sizes, **options)


def train_for(rank):
    mesh = ParallelMesh(RankMesh({"dp": TRAINERS}), CPU)
    if rank >= TRAINERS:
        return None
    return TrainEngine(CausalPolicy(make_model()), mesh, "float32", ActorConfig())


def learn(train):
    """Changes about a twentieth of the weights, as an update at a small learning rate does."""
    with torch.no_grad():
        for tensor in train.local_parameters().values():
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
            flat[::20] *= 1.01


def holds(rollout, weights):
    return all(
        torch.equal(tensor, cut(weights[name], rollout.held[name][0].box).bfloat16())
        for name, tensor in rollout.tensors.items()
    )


def program(rank):
    torch.set_num_threads(1)
    train = train_for(rank)
    found = {}
    for method in ("full", "delta", "auto", *LOSSY):
        found[method] = run(rank, train, method, damages=0)
    found["damaged"] = run(rank, train, "delta", damages=1)
    return found


def run(rank, train, method, damages):
    rollout = None if train is not None else Part(rank - TRAINERS, GENERATORS)
    channel = WeightChannel(dist.group.WORLD, torch.bfloat16, CPU, train, rollout, method=method)
    found = {"bytes": [], "same": [], "costs": [], "records": []}
    real = dist.all_to_all_single
    for sync in range(SYNCS):
        if train is not None:
            learn(train)
        whole = [dict(train.full_parameters()) if train is not None else None]
        dist.broadcast_object_list(whole)
        link = dist.all_to_all_single = Link(damages if sync == 2 and rank == 0 else 0)
        try:
            cost = channel.send(sync) if train is not None else channel.receive()[1]
        finally:
            dist.all_to_all_single = real
        found["bytes"].append(link.bytes)
        found["costs"].append(cost)
        if method not in LOSSY:
            found["same"].append(rollout is None or holds(rollout, whole[0]))
        if method == "delta" or method in LOSSY:
            found["records"].append(records(channel))
            found["same"].append(rollout is None or same_record(channel, rollout))
    return found


def records(channel):
    """The checksums of what is held of each message."""
    return sorted(compute_checksum(values) for _, values in channel._sync.coded.records())


def same_record(channel, rollout):
    """Whether the engine's tensors are what the receiver noted."""
    total = 0
    for moves, values in channel._sync.coded.records():
        for move in moves:
            size = box_numel(move.box)
            part, values = values[:size].view(box_shape(move.box)), values[size:]
            start = move.target.start
            place = tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))
            if not torch.equal(rollout.tensors[move.target.tensor][place], part):
                return False
            total += size
    return total == sum(tensor.numel() for tensor in rollout.tensors.values())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(program, tmp_path_factory.mktemp("ranks"), TRAINERS + GENERATORS)


@pytest.mark.parametrize("method", ["full", "delta", "auto", "damaged", *LOSSY])
def test_the_generators_weights_are_the_trainers_at_every_version(method, ranks):
    for of_rank in ranks:
        assert all(of_rank[method]["same"]) and len(of_rank[method]["same"]) >= SYNCS


@pytest.mark.parametrize("method", ["delta", "damaged", *LOSSY])
def test_the_receivers_records_are_those_of_the_senders(method, ranks):
    for sync in range(SYNCS):
        sent, received = (
            sorted(found for of_rank in side for found in of_rank[method]["records"][sync])
            for side in (ranks[:TRAINERS], ranks[TRAINERS:])
        )
        assert sent == received and sent  # each message of this plan has one receiver


def test_differences_are_small(ranks):
    def sent(method, sync):
        return sum(of_rank[method]["bytes"][sync] for of_rank in ranks[:TRAINERS])

    for sync in range(1, SYNCS):
        assert sent("delta", 0) == sent("full", 0) > 5 * sent("delta", sync)
    for rank in range(TRAINERS):
        costs = ranks[rank]["delta"]["costs"]
        assert [cost.compared > 0 for cost in costs] == [False, True, True, True]
        assert costs[1].changed / costs[1].compared == pytest.approx(0.05, abs=0.02)
    first = ranks[0]["delta"]["costs"]
    assert first[0].sent == ranks[0]["delta"]["bytes"][0]
    model = 2 * sum(parameter.numel() for parameter in make_model().parameters())
    records = [of_rank["delta"]["costs"][-1].record for of_rank in ranks]
    assert sum(records[:TRAINERS]) == sum(records[TRAINERS:]) == model


def test_both_ways_are_tried_and_all_ranks_agree(ranks):
    methods = [[cost.method for cost in of_rank["auto"]["costs"]] for of_rank in ranks]
    assert methods == [methods[0]] * len(ranks)
    assert methods[0][:2] == ["full", "delta"]


def test_a_flipped_bit_is_found_and_sent_again(ranks):
    costs = [of_rank["damaged"]["costs"] for of_rank in ranks]
    assert [cost.repeated for cost in costs[0]] == [0, 0, 1, 0]
    assert sum(cost.repeated for of_rank in costs[1:] for cost in of_rank) == 0
    assert costs[0][3].sent < costs[0][2].sent  # differences again, after that


@pytest.mark.more
def test_what_is_damaged_twice_ends_the_job(tmp_path):
    found = run_ranks(damaged_for_good, tmp_path, 2)
    assert "damaged on their way to rank 1" in found[1] and "rollout.weight_sync" in found[1]


def damaged_for_good(rank):
    torch.set_num_threads(1)
    mesh = ParallelMesh(RankMesh({"dp": 1}), CPU)
    train = None
    if rank == 0:
        train = TrainEngine(CausalPolicy(make_model()), mesh, "float32", ActorConfig())
    rollout = Part(0, 1) if rank else None
    channel = WeightChannel(dist.group.WORLD, torch.bfloat16, CPU, train, rollout, method="delta")
    dist.all_to_all_single = Link(100 if rank == 0 else 0)
    try:
        channel.receive() if rank else channel.send(1)
    except RolloutError as error:
        return str(error)
    return ""

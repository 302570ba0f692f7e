"""Four ranks train and four generate: weights travel as parcels, each box once."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, make_model
from layout_cases import cut
from ranks import run_ranks
from weight_transitions import even_range

from hybridrl.config.schema import ActorConfig
from hybridrl.controller.group_call import UNKNOWN, ShardedResult, ShardInfo
from hybridrl.controller.table_expression import ResultTable
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.boxes import Piece, box_shape, full_box
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.rollout.rollout_engine import BatchedEngine
from hybridrl.rollout.weight_writer import WeightWriter
from hybridrl.weights.weight_channel import WeightChannel

TRAINERS, GENERATORS = 4, 4


class Part(BatchedEngine):
    """Holds part `index` of `parts` of every parameter, along dim 0."""

    def __init__(self, index, parts):
        super().__init__()
        self._index, self._parts = index, parts
        self.tensors = {}

    def pieces(self, shapes):
        found = {}
        for name, shape in shapes.items():
            box = (even_range(shape[0], self._index, self._parts), *full_box(shape[1:]))
            found[name] = (Piece(box, name, (0,) * len(shape)),)
            self.tensors[name] = torch.zeros(box_shape(box), dtype=torch.bfloat16)
        self.held = found
        return found

    def writer(self):
        return WeightWriter(self.tensors, self.held)

    def load(self, weights):
        raise NotImplementedError

    def generate(self, batch, sampling, seed):
        raise NotImplementedError


class OnDisk(ShardedResult):
    """What a call returned, in a file for each rank; counts what is read."""

    def __init__(self, folder):
        super().__init__(UNKNOWN, None)
        self._found = [torch.load(folder / f"{r}", weights_only=False) for r in range(TRAINERS)]
        self.read_bytes = 0

    def infos(self):
        return [ShardInfo.of(batch, rows, total) for batch, rows, total in self._found]

    def batch(self, index):
        return self._found[index][0]

    def read(self, index, rows, names):
        found = super().read(index, rows, names)
        self.read_bytes += bytes_of(found)
        return found


def bytes_of(batch):
    return int(batch.lengths("data").sum())


def program(rank, folder):
    torch.set_num_threads(1)
    mesh = ParallelMesh(RankMesh({"dp": TRAINERS}), CPU)
    train = None
    if rank < TRAINERS:
        train = TrainEngine(CausalPolicy(make_model()), mesh, "float32", ActorConfig())
    return [run(rank, folder, train, parts) for parts in (1, 2)]


def run(rank, folder, train, parts):
    """Bytes put, or read and held, by this rank, whose engine has one of so many parts."""
    rollout = Part((rank - TRAINERS) % parts, parts) if train is None else None
    channel = WeightChannel(dist.group.WORLD, torch.bfloat16, CPU, train, rollout, parcels=True)
    found = {}
    for _ in range(2):  # what was worked out serves again
        if train is not None:
            with torch.no_grad():
                for tensor in train.local_parameters().values():
                    tensor.mul_(2)
            batch, rows, total = channel.pack()
            torch.save((batch, np.asarray(rows), total), folder / f"{rank}")
            found["put"] = bytes_of(batch)
            found["weights"] = {n: t.clone() for n, t in train.full_parameters()}
        dist.barrier()
        whole_model = [found.pop("weights", None)]
        dist.broadcast_object_list(whole_model)
        if rollout is not None:
            shards = OnDisk(folder)
            channel.unpack(ResultTable((shards,)).read(np.asarray(channel.wanted), None))
            found["read"] = shards.read_bytes
            found["held"] = sum(tensor.nbytes for tensor in rollout.tensors.values())
            for name, tensor in rollout.tensors.items():
                ((box, *_),) = rollout.held[name]
                assert torch.equal(tensor, cut(whole_model[0][name], box).bfloat16())
        dist.barrier()
    return found


def damaged(column):
    """The same bytes, but for a bit."""
    values = column.values.as_subclass(torch.Tensor).clone()
    values[len(values) // 2] ^= 1
    return column._replace(values=values)


def differences(rank):
    """What each rank put or read at each of four versions: plain differences, a damaged parcel,
    differences again, and after a version that the receivers did not take."""
    torch.set_num_threads(1)
    mesh = ParallelMesh(RankMesh({"dp": 1}), CPU)
    train = None
    if rank == 0:
        train = TrainEngine(CausalPolicy(make_model()), mesh, "float32", ActorConfig())
    rollout = Part(rank - 1, 2) if rank else None
    channel = WeightChannel(
        dist.group.WORLD, torch.bfloat16, CPU, train, rollout, parcels=True, method="delta"
    )
    found = []
    for event in ("first", "next", "damaged", "next", "skipped"):
        put = [None]
        if train is not None:
            for _ in range(1 + (event == "skipped")):
                with torch.no_grad():
                    for tensor in train.local_parameters().values():
                        tensor.flatten()[::20] *= 1.01
                coded, whole = channel.pack()[0], channel.pack_whole()[0]
            if event == "damaged":
                coded = coded.with_columns({"data": damaged(coded["data"])})
            put = [(coded, whole, dict(train.full_parameters()))]
        dist.broadcast_object_list(put)
        coded, whole, weights = put[0]
        if rollout is not None:
            channel.unpack(coded.take(np.asarray(channel.wanted)))
            lacked = channel.lacking
            channel.complete(whole.take(np.asarray(lacked, dtype=np.int64)))
            same = all(
                torch.equal(tensor, cut(weights[name], rollout.held[name][0].box).bfloat16())
                for name, tensor in rollout.tensors.items()
            )
            found.append((same, len(lacked), channel.cost.received))
        else:
            found.append((channel.cost.sent, channel.cost.changed, channel.cost.compared))
    return found


@pytest.mark.more
def test_differences_travel_and_what_cannot_be_used_comes_whole(tmp_path):
    sender, *receivers = run_ranks(differences, tmp_path, 3)
    for receiver in receivers:
        assert all(same for same, _, _ in receiver)
        lacked = [count for _, count, _ in receiver]
        assert (lacked[0], lacked[1], lacked[3]) == (0, 0, 0) and lacked[4] == 1
        read = [size for _, _, size in receiver]
        assert 5 * read[1] < read[0] == read[4] and read[3] == pytest.approx(read[1], rel=0.3)
    assert sum(receiver[2][1] for receiver in receivers) == 1  # one parcel was damaged
    assert sender[0][2] == 0 and 0.02 < sender[1][1] / sender[1][2] < 0.07


def test_each_box_is_put_once_and_read_by_those_that_need_it(tmp_path):
    (tmp_path / "shards").mkdir()
    ranks = run_ranks(program, tmp_path, TRAINERS + GENERATORS, tmp_path / "shards")
    model = 2 * sum(parameter.numel() for parameter in make_model().parameters())
    for run, parts in enumerate((1, 2)):
        found = [of_rank[run] for of_rank in ranks]
        assert sum(each["put"] for each in found[:TRAINERS]) == model
        for each in found[TRAINERS:]:
            assert each["read"] == each["held"]
            assert each["held"] == pytest.approx(model / parts, rel=0.05)

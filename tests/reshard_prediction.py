"""What ranks count when they execute a plan, predicted; and a plan executed in one process."""

from collections import defaultdict

from weight_transitions import count_received, count_sent

from hybridrl.layout.boxes import box_numel
from hybridrl.layout.tensor_layout import TransferTraffic, copy_moves
from hybridrl.system.device_traits import default_bucket_bytes
from hybridrl.weights.parcel_transfer import (
    RankLoad,
    compute_rank_loads,
    compute_round_capacity,
    group_into_streams,
    max_adjacent_sum,
    schedule,
    split_stream,
)


def max_load(loads):
    """Return the maximum of each field."""
    found = list(loads)
    most = (max((load[i] for load in found), default=0) for i in range(2))
    return RankLoad(*most)


def count(plan, dtype, bucket_bytes):
    """Predict the traffic of each rank that takes part in a plan."""
    streams = group_into_streams(plan.moves)
    cut = schedule(
        max_load(compute_rank_loads(streams).values()), compute_round_capacity(bucket_bytes, dtype)
    )
    held = defaultdict(lambda: [0] * cut.rounds)
    for stream in streams:
        for index, moves in enumerate(split_stream(stream, cut)):
            size = sum(box_numel(move.box) for move in moves)
            held[stream.sender][index] += size * len(stream.receivers)
            for rank in stream.receivers:
                held[rank][index] += size
    copied = defaultdict(int)
    for move in plan.copies:
        copied[move.sender] += box_numel(move.box)
    received, sent, size = count_received(plan), count_sent(plan), dtype.itemsize
    return {
        rank: TransferTraffic(
            received[rank] * size,
            sent[rank] * size,
            copied[rank] * size,
            cut.rounds,
            max_adjacent_sum(held[rank]) * size,
        )
        for rank in sorted(held.keys() | copied.keys())
    }


def reshard_in_process(plan, reads, writes, dtype, bucket_bytes=None):
    """Copy values from tensor to tensor, without a buffer unless they must be cast.

    Args:
        reads, writes: By rank; see `weights.collective_reshard.CollectiveReshard`.
        bucket_bytes: Four times the most memory for a cast; None: what suits CPUs.

    Returns:
        By rank that has a part in the plan, what separate processes would have counted.
    """
    bucket_bytes = default_bucket_bytes("cpu") if bucket_bytes is None else bucket_bytes
    room = compute_round_capacity(bucket_bytes, dtype)
    for move in (*plan.copies, *plan.moves):
        for receiver in move.receivers:
            copy_moves([move], reads[move.sender], writes[receiver], dtype, room)
    return count(plan, dtype, bucket_bytes)

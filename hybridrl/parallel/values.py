"""What every rank of a group says, where many say the same."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch
import torch.distributed as dist

DIGEST_BYTES = 32


def all_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in the order of ranks; equal ones travel once and are one object.
    Collective.

    Of a thousand ranks few differ in what they generate with, and none in the names of a stage's
    parameters; a thousand copies would take seconds to read, and gigabytes.
    """
    said = pickle.dumps(value)
    mine = torch.frombuffer(bytearray(hashlib.sha256(said).digest()), dtype=torch.uint8)
    digests = torch.empty(group.size() * DIGEST_BYTES, dtype=torch.uint8)
    dist.all_gather_into_tensor(digests, mine, group=group)
    found: dict[bytes, Any] = {}
    order = [bytes(digest.tolist()) for digest in digests.view(-1, DIGEST_BYTES)]
    for rank, digest in enumerate(order):
        if digest not in found:
            here = [value]
            dist.broadcast_object_list(here, group=group, group_src=rank)
            found[digest] = here[0]
    return [found[digest] for digest in order]

"""Which of some ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.errors import ConfigError


def ranks_by_node(ranks: Sequence[int], nodes: Sequence[str]) -> list[list[int]]:
    """The ranks of each node, as many on each.

    Args:
        ranks: Some ranks of a world, rising.
        nodes: For each rank of the world, its node.

    Raises:
        ConfigError: if some nodes have more of the ranks than others.
    """
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(nodes[rank], []).append(rank)
    counts = {len(one) for one in found.values()}
    if len(counts) > 1:
        said = ", ".join(f"{len(one)} on {node}" for node, one in found.items())
        raise ConfigError(
            "parallel.gradients=two_level_int4 needs as many ranks that share parameters on each "
            f"node, and there are {said}. Set parallel.gradients=int8, or parallel.shards so that "
            "they are equally many."
        )
    return list(found.values())

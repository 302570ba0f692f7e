"""Flattening: every role on every device, taking turns. Nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.core.cluster import Cluster


def place(roles: Sequence[str], cluster: Cluster) -> dict[str, list[int]]:
    """Each role on all devices, in their order."""
    return {role: list(range(len(cluster.devices))) for role in roles}

"""Flattening: every role on every device, taking turns. Nothing overlaps, and no model is held by
fewer devices than there are."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.placement.placement import Placement, RolePlace, RoleRequirements
from hybridrl.system.cluster_spec import ClusterSpec


def place_colocated(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place each role on all devices, in their order: roles take turns, nothing overlaps, and every
    model is sharded over all devices."""
    everywhere = tuple(range(len(cluster.devices)))
    return Placement(
        "flattening", {role.name: RolePlace(everywhere, role.parallel) for role in roles}
    )

"""Interleaving: what learns is on all devices; what only scores is on complementary parts of them,
so that reference and reward work at the same time, each gathered from fewer devices.

The placement called Interleaving in "Adaptive Placement and Parallelism Framework for Accelerating
RLHF Training" (arXiv:2312.11819).
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.schema import PlacementConfig
from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.placement.placement import Placement, RolePlace, RoleRequirements
from hybridrl.placement.role_settings import parse_role_settings
from hybridrl.system.cluster_spec import ClusterSpec


def place_interleaved(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place roles that train on all devices, and roles that only score on complementary parts of
    them, so that reference and reward work at the same time, each gathered from fewer devices.
    Parts overlap only where shares sum to more than 1. Called Interleaving in "Adaptive Placement
    and Parallelism Framework for Accelerating RLHF Training" (arXiv:2312.11819)."""
    total = len(cluster.devices)
    scoring = [role for role in roles if not role.trains]
    found, start = {}, 0
    for role in roles:
        share = parse_role_settings(settings, role.name).share
        if share is None:
            share = 1.0 if role.trains else 1 / len(scoring)
        unit = model_parallel_size(role.parallel)
        count = min(total, max(unit, unit * round(share * total / unit)))
        if count == total:
            devices = range(total)
        else:
            devices = [(start + i) % total for i in range(count)]
            start += count
        found[role.name] = RolePlace(tuple(sorted(devices)), role.parallel)
    return Placement("interleaving", found)

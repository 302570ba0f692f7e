"""Separation: some devices train, the others generate with a copy of the weights of their own, so
that the next samples can be generated while the last ones are learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridrl.config.schema import Config, PlacementConfig
from hybridrl.errors import ConfigError
from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.placement.placement import (
    ACTOR_ROLE,
    GENERATOR_ROLE,
    Placement,
    RolePlace,
    RoleRequirements,
)
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot


def place_disaggregated(
    roles: Sequence[RoleRequirements], cluster: ClusterSpec, settings: PlacementConfig
) -> Placement:
    """Place roles that train on the first devices and generation, with weights of its own, on the
    last `generation_devices`, so that the next samples can be generated while the last ones are
    learned. Roles that only score are placed on the side that `scoring` names.

    Raises:
        ConfigError: if one side would have no device, or nothing is generated.
    """
    total = len(cluster.devices)
    if total < 2:
        raise ConfigError(
            f"placement=separation needs a device that trains and one that generates, but there is "
            f"{total}. Set num_devices=2 or more, or placement=flattening."
        )
    generating = settings.generation_devices
    if generating is None:
        generating = _choose_generation_device_count(total, roles)
    if not 1 <= generating < total:
        raise ConfigError(
            f"placement.generation_devices={generating}: of {total} devices, 1 to {total - 1} can "
            "generate."
        )
    training, generation = range(total - generating), range(total - generating, total)
    sides = {"training": training, "generation": generation}
    if settings.scoring not in sides:
        raise ConfigError(
            f"placement.scoring={settings.scoring}: must be `training` or `generation`."
        )
    found = {}
    for role in roles:
        side = training if role.trains else sides[settings.scoring]
        if len(side) % model_parallel_size(role.parallel):
            side = training  # which the actor fits on, and this model is cut alike
        found[role.name] = RolePlace(tuple(side), role.parallel)
        if role.name == ACTOR_ROLE and role.generation is not None:
            found[GENERATOR_ROLE] = RolePlace(tuple(generation), role.generation)
    if GENERATOR_ROLE not in found:
        raise ConfigError(
            "placement=separation gives generation its own devices, but this trainer generates "
            "nothing. Set placement=flattening."
        )
    return Placement("separation", found)


def choose_weight_transport(config: Config, devices: Iterable[DeviceSlot]) -> tuple[bool, str]:
    """Choose how weights travel to the generator.

    Args:
        devices: Of trainer and generator.

    Returns:
        Whether as parcels in the object store, and by which `rollout.weight_sync`.
    """
    flow, method = config.placement, config.rollout.weight_sync
    store = flow.transport == "store" or (flow.transport == "auto" and flow.staleness > 1)
    if method == "auto" and len({device.node for device in devices}) == 1:
        method = "full"  # within a node to copy is quicker than to encode
    elif method == "auto" and store:
        method = "delta"  # parcels are made without knowing how long they will be on their way
    return store, method


def _choose_generation_device_count(total: int, roles: Sequence[RoleRequirements]) -> int:
    """Return about half of the devices, a number that the model can be cut over on both sides."""
    train = next(
        (model_parallel_size(role.parallel) for role in roles if role.name == ACTOR_ROLE), 1
    )
    share = next(
        (model_parallel_size(r.generation) for r in roles if r.name == ACTOR_ROLE and r.generation),
        1,
    )
    fitting = [n for n in range(share, total, share) if (total - n) % train == 0]
    return min(fitting, key=lambda n: (abs(2 * n - total), n), default=total // 2)

"""The worker groups of a job, built where its placement says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridrl.trainers.role_spec import played_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridrl.config.schema import Config
    from hybridrl.controller import WorkerGroup
    from hybridrl.controller.executor import Executor
    from hybridrl.job.worker_groups import Built
    from hybridrl.placement.disaggregated_actor import SeparatedActor
    from hybridrl.system.cluster_spec import Device


def build_groups(job: Built, executor: Executor) -> dict[str, Any]:
    """Every role's group, its workers ready; roles that another one plays have that one's."""
    from hybridrl.controller import WorkerGroup
    from hybridrl.job.worker_groups import worker_of

    groups: dict[str, Any] = {}
    for role, place in job.placement.roles.items():
        worker_class, keywords = worker_of(role, job)
        groups[role] = WorkerGroup(executor, role, worker_class, place.devices, **keywords)
    for group in groups.values():
        group.ready()
    if job.placement.is_separated:
        groups["actor"] = _joined_actor(
            groups["actor"], groups["generator"], job.config, executor.cluster.devices
        )
    for role in job.roles:
        groups[role] = groups[played_by(job.roles, role, job.config)]
    return groups


def check_planned_faults(job: Built) -> None:
    """Refuses planned faults that the workers to be built would never meet.

    Raises:
        ConfigError: names the role, the method or the rank that is not there.
    """
    from hybridrl.controller.fault_injection import PlannedFaults
    from hybridrl.job.worker_groups import worker_of

    if faults := PlannedFaults():
        places = job.placement.roles.items()
        faults.check({r: (worker_of(r, job)[0], len(place.devices)) for r, place in places})


def _joined_actor(
    trainer: WorkerGroup, generator: WorkerGroup, config: Config, devices: Sequence[Device]
) -> SeparatedActor:
    from hybridrl.placement.disaggregated_actor import SeparatedActor
    from hybridrl.placement.separation import way_of_weights

    ends = (devices[number] for number in (*trainer.devices, *generator.devices))
    store, weight_sync = way_of_weights(config, ends)
    return SeparatedActor(
        trainer,
        generator,
        staleness=config.placement.staleness,
        in_flight=config.placement.in_flight,
        store=store,
        weight_sync=weight_sync,
        differs_from_folder=config.actor.lora.path is not None,
    )

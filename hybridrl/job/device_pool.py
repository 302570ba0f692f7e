"""The devices of a job: taken when it starts, and again after some were lost; and the paths of its
workers, which every node must see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.role_models import list_model_paths
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.rewards.loading import parse_function_list
from hybridrl.system import user_code
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.system.locations import Location, is_url, parse_location
from hybridrl.trainers.role_spec import RoleSpec

if TYPE_CHECKING:
    from hybridrl.controller.executor import Executor
    from hybridrl.ray_backend.connection import ClusterConnection
    from hybridrl.ray_backend.memory_keepers import MemoryKeepers

_ENGINE_MODULES = {
    "vllm": "hybridrl.rollout.vllm_engine",
    "transformers": "hybridrl.rollout.transformers_engine",
    "pipeline": "hybridrl.systems.unequal_generation.pipeline_engine",
}


class DevicePool:
    """A pool of a job's devices that starts one executor after another. With Ray all executors
    share one cluster connection.

    Args:
        run: The run's folder.

    Attributes:
        wanted: How many there were at first; 0 before.
    """

    def __init__(self, config: Config, roles: Mapping[str, RoleSpec], run: Path) -> None:
        self._config, self._roles, self._run = config, roles, run
        self._ray: ClusterConnection | None = None
        self._cluster: ClusterSpec | None = None
        self._number = config.num_devices
        self._cpus_per_host: float | None = None
        self._keepers: MemoryKeepers | None = None
        self._nodes: list[str] = []
        self.wanted = 0

    def executor(self) -> Executor:
        """Start an executor with one host on each device."""
        if self._config.executor == "inline":
            from hybridrl.controller import InlineExecutor

            return InlineExecutor(self._config.devices, self._run)
        from hybridrl.ray_backend.connection import ClusterConnection
        from hybridrl.ray_backend.ray_executor import RayExecutor

        if self._ray is None:
            self._ray = ClusterConnection(self._config.ray.address)
        folders, written = folders_of_workers(self._config, self._run)
        made = RayExecutor(
            self._config.devices,
            self._number,
            connection=self._ray,
            cpus_per_host=self._cpus_per_host,
            timeout_s=self._config.controller.timeout_s,
            heartbeat_s=self._config.controller.heartbeat_s,
            start_timeout_s=self._config.ray.start_timeout_s,
            preload=self._modules_of_workers(),
            run_directory=self._run,
            paths=list_worker_paths(self._config, self._run),
            folders=folders,
            written=written,
        )
        self._cluster, self._cpus_per_host = made.cluster, made.cpus_per_host
        self._nodes = made.nodes
        self.wanted = self.wanted or len(made.cluster.devices)
        return made

    def wait_after_loss(self, progress: Callable[[str], None]) -> None:
        """Wait for lost devices to come back. The next executor gets as many devices as before or,
        if `recover.min_devices` allows it, as many as are there and can hold the roles.

        Raises:
            ConfigError: if there are too few.
        """
        if self._cluster is None or self._ray is None:
            return
        if not self._ray.is_whole and self._ray.node is not None:  # the next one has all devices
            self._ray.close()
            self._ray = self._keepers = None
            return
        from hybridrl.ray_backend.connection import wait_for_devices

        recover, kind = self._config.recover, self._cluster.kind
        least = recover.min_devices or self.wanted
        progress(f"waiting for {self.wanted} devices")
        cpus = self._cpus_per_host or 1.0
        number = wait_for_devices(kind, self.wanted, least, cpus, recover.wait_s)
        while number > least and not self._has_places(ClusterSpec.of_one_node(kind, number)):
            number -= 1
        self._number = number

    def may_grow(self) -> bool:
        """Return whether the initial number of devices could be reserved again after the job
        continued with fewer."""
        if self._cluster is None or not (missing := self.wanted - len(self._cluster.devices)):
            return False
        from hybridrl.ray_backend.connection import count_free_devices, list_nodes

        return (
            count_free_devices(list_nodes(), self._cluster.kind, self._cpus_per_host or 1.0)
            >= missing
        )

    def keep_copies(self) -> Location | None:
        """Start a keeper of checkpoint copies on every node, again where one was lost, and return
        the folder of their files; None if the settings ask for none."""
        others = self._config.checkpoint.memory_copies
        if not others or not self._config.checkpoint.wanted or self._ray is None:
            return None
        from hybridrl.ray_backend.memory_keepers import MemoryKeepers

        self._keepers = self._keepers or MemoryKeepers(others)
        self._keepers.start(self._nodes)
        return parse_location(self._keepers.url)

    def close(self) -> None:
        """Close the memory keepers, and leave the cluster."""
        if self._keepers is not None:
            self._keepers.close()
        if self._ray is not None:
            self._ray.close()

    def _has_places(self, cluster: ClusterSpec) -> bool:
        try:
            resolve_placement(self._config, cluster, self._roles)
        except ConfigError:
            return False
        return True

    def _modules_of_workers(self) -> list[str]:
        """Return the modules that every worker imports, for hosts to preload while the driver
        prepares."""
        modules = ["hybridrl.workers.actor_worker"]
        if any(spec.generates for spec in self._roles.values()):
            modules.append(_ENGINE_MODULES[self._config.rollout.engine])
        if self._config.checkpoint.memory_copies:  # which makes its URLs known
            modules.append("hybridrl.ray_backend.memory_keepers")
        return modules


def list_worker_paths(config: Config, run_directory: Path) -> dict[str, Path]:
    """List the paths of workers by setting. Hub names are left out, because each node downloads
    them."""
    paths = {_run_setting(config): run_directory}
    read = list_model_paths(config)
    read["rollout.plan"] = config.rollout.plan
    read["checkpoint.folder"] = config.checkpoint.folder  # which the driver has made
    code: dict[str, list[Any]] = {
        "rollout.episode": [config.rollout.episode],
        "algorithm.policy_loss": [config.algorithm.policy_loss],
        "algorithm.advantage": [config.algorithm.advantage],
        "actor.optimizer.name": [config.actor.optimizer.name],
    }
    for kind, scores in (("reward", config.reward), ("cost", config.cost)):
        if scores is not None:
            code[f"{kind}.function"] = parse_function_list(scores.function)
            code[f"{kind}.check"] = parse_function_list(scores.check)
    for setting, path in read.items():
        if path and Path(path).expanduser().exists():
            paths[setting] = Path(path).expanduser()
    for setting, specs in code.items():
        for spec in specs:
            place = user_code.split_spec(spec) if isinstance(spec, str) else None
            if place and user_code.is_file_path(place[0]):
                paths[setting] = Path(place[0]).expanduser()
    return paths


def folders_of_workers(config: Config, run_directory: Path) -> tuple[dict[str, str], list[str]]:
    """Return the folders and URLs that workers read, by setting, and the settings of those that
    they write to."""
    checkpoints = config.checkpoint
    written = {_run_setting(config): str(run_directory.absolute())}
    if checkpoints.folder is not None and checkpoints.wanted:
        written["checkpoint.folder"] = str(parse_location(checkpoints.folder).absolute())
    named = {"resume": config.resume, "fork": config.fork}
    read = {setting: url for setting, url in named.items() if url and is_url(url)}
    return written | read, list(written)


def _run_setting(config: Config) -> str:
    return "run.directory" if config.run.directory else "run.root"

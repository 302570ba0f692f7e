"""Job: everything that a driver program needs, built from a configuration.

with Job(load_config(["trainer.steps=40"])) as job:
    actor, reward = job.groups["actor"], job.groups["reward"]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from hybridrl.config.checks import check
from hybridrl.config.load import to_yaml
from hybridrl.config.placement_checks import check_placement, played_by
from hybridrl.config.schema import Config
from hybridrl.config.shared_paths import paths_of_workers
from hybridrl.core.garbage import no_collection
from hybridrl.errors import ConfigError
from hybridrl.observe.metrics import open_writers
from hybridrl.observe.run_directory import RunDirectory
from hybridrl.trainers import load_trainer

if TYPE_CHECKING:
    from hybridrl.controller import BatchRef, WorkerGroup
    from hybridrl.core.batch import Batch
    from hybridrl.data.loader import PromptLoader
    from hybridrl.placement.separated_actor import SeparatedActor
    from hybridrl.planner.plan import Plan
    from hybridrl.trainers.base import Trainer


class Job:
    """A run: its folder, model, data, executor and worker groups. Use it in a `with`.

    Everything that can be wrong with the settings is found before a worker is built.

    Args:
        config: See `load_config`.
        progress: Told what begins, for a person to read.
        roles: Worker groups to build; None: those of `config.trainer.name`.

    Attributes:
        directory: The run's files.
        training, held_out: Tokenized data, of the kind that the trainer learns from.
        examples: Prompts with right responses; None where the data has none.
        loader: Endless iterator over batches of `data.prompts_per_step` rows of `training`.
        sampling: How samples are drawn while training.
        executor: The devices.
        placement: Which role lives on which devices.
        plan: What that takes of each device.
        groups: The worker groups, by role.
        started: When this process began, seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[str], None] = lambda _: None,
        roles: Sequence[str] | None = None,
    ) -> None:
        self.started = psutil.Process().create_time()
        self.config = config
        self.name = f"hybridrl-{os.getpid()}-{int(time.time())}"
        check(config)
        self.trainer_class = load_trainer(config.trainer.name)
        self.directory = _make_directory(config)
        self.directory.write_config(to_yaml(config))
        trackers = config.metrics or []
        trackers = [trackers] if isinstance(trackers, str) else list(trackers)
        self._example_loader: PromptLoader | None = None
        self._numbered = 0
        self._writers = open_writers(trackers, self.directory, config.run.name, asdict(config))
        progress("starting Ray and loading data" if config.executor == "ray" else "loading data")
        with no_collection(), ThreadPoolExecutor(1) as beside:
            # Ray takes seconds to start, and so do the imports of data and model code. Ray's
            # processes end with the thread that started them, so that is this one.
            loading = beside.submit(self._load)
            self.executor = self._start_executor()
        try:
            loading.result()
            wanted = list(roles or self.trainer_class.roles(config))
            self.placement = check_placement(config, self.executor.cluster, wanted)
            self.directory.write_placement(self.placement.to_json())
            self.plan = self._make_plan()
            progress(f"starting workers on {len(self.executor.cluster.devices)} devices")
            self._build_groups(wanted)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def put(self, batch: Batch) -> BatchRef:
        """Hands a batch of the driver's to the workers; see `Executor.put`."""
        return self.executor.put(batch)

    def next_batch(self) -> BatchRef:
        """What the next step learns from: prompts, numbered in the column `group_id`, or examples,
        or pairs."""
        from hybridrl.data.preferences import samples_of_pairs

        batch = next(self.loader)
        if self.trainer_class.DATA == "pairs":
            return self.put(samples_of_pairs(batch))
        numbers = np.arange(self._numbered, self._numbered + len(batch))
        self._numbered += len(batch)
        return self.put(batch.with_columns({"group_id": numbers}))

    def make_trainer(self) -> Trainer:
        """The driver program that `trainer.name` asks for."""
        return self.trainer_class(
            self.config, self.groups, self.sampling, self.next_batch, self.next_examples
        )

    def next_examples(self, coefficient: float = 1.0) -> BatchRef:
        """Prompts with right responses, for one supervised update of this weight."""
        from hybridrl.data.loader import PromptLoader
        from hybridrl.trainers.shaping import loss_weights

        if self.examples is None:
            raise ConfigError(
                f"algorithm.ptx_coefficient={self.config.algorithm.ptx_coefficient} needs right "
                "responses, and only built-in tasks (data.task) bring them."
            )
        if self._example_loader is None:
            config = self.config
            self._example_loader = PromptLoader(
                self.examples, config.data.prompts_per_step, config.run.seed
            )
        batch = next(self._example_loader)
        weights = loss_weights(batch, "token-mean").ragged("loss_weights")
        scaled = weights._replace(values=weights.values * coefficient)
        return self.put(batch.with_columns({"loss_weights": scaled}))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds figures of a step to `metrics.jsonl` and the trackers."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Ends workers, and Ray if it was started here. Leaves nothing in shared memory."""
        from hybridrl.rollout.shared_memory import remove_shared_memory

        self.executor.close()
        remove_shared_memory(self.name)
        for writer in self._writers:
            writer.close()

    def _start_executor(self) -> Any:
        from hybridrl.rollout.shared_memory import remove_leftovers

        remove_leftovers()
        config = self.config
        if config.executor == "inline":
            from hybridrl.controller import InlineExecutor

            return InlineExecutor(config.devices, self.directory.path)
        from hybridrl.ray_backend.executor import RayExecutor

        return RayExecutor(
            config.devices,
            config.num_devices,
            address=config.ray.address,
            run_directory=self.directory.path,
            timeout_s=config.controller.timeout_s,
            start_timeout_s=config.ray.start_timeout_s,
            preload=self._modules_of_workers(),
            paths=paths_of_workers(config, self.directory.path),
        )

    def _modules_of_workers(self) -> list[str]:
        """What workers import anyway, while the driver prepares."""
        modules = ["hybridrl.workers.actor"]
        if self.trainer_class.GENERATES:
            modules.append(f"hybridrl.rollout.{self.config.rollout.engine}")
        return modules

    def _load(self) -> None:
        """Model folder, tokenizer and data, and what follows from their sizes."""
        from hybridrl import inputs
        from hybridrl.data.loader import PromptLoader
        from hybridrl.models import load_config, load_tokenizer
        from hybridrl.planner.at_start import count_models
        from hybridrl.rollout import Sampling

        config, rollout, kind = self.config, self.config.rollout, self.trainer_class.DATA
        self.model_path = inputs.model_folder(config, self.directory.path)
        self.tokenizer_path = config.model.tokenizer or self.model_path
        self.tokenizer = load_tokenizer(self.tokenizer_path)
        inputs.check_reward_tokenizers(config, self.tokenizer, self.tokenizer_path)
        rows = inputs.load_rows(config, kind, self.tokenizer)
        self.training, self.held_out, self.examples = rows.training, rows.held_out, rows.examples
        self.longest_prompt, self.longest_response = rows.longest_prompt, rows.longest_response
        self.context_length = self.longest_prompt + self.longest_response
        inputs.check_lengths(config, kind, rows, load_config(self.model_path))
        self.loader = PromptLoader(
            self.training, config.data.prompts_per_step, config.run.seed, config.data.shuffle
        )
        self.sampling = Sampling(
            rollout.max_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            tuple(rollout.stop),
            rollout.min_tokens,
        )
        count_models(self._with_model(), self.trainer_class.roles(config))

    def _make_plan(self) -> Plan:
        from hybridrl.planner.at_start import plan_job

        lengths = (self.longest_prompt, self.longest_response)
        return plan_job(self._with_model(), self.executor.cluster, self.placement, lengths)

    def _with_model(self) -> Config:
        """The settings, with the tiny model's folder if there was none."""
        return replace(self.config, model=replace(self.config.model, path=self.model_path))

    def _build_groups(self, wanted: Sequence[str]) -> None:
        from hybridrl.controller import WorkerGroup
        from hybridrl.roles import worker_of

        self.groups = {}
        for role, place in self.placement.roles.items():
            worker_class, keywords = worker_of(role, self)
            self.groups[role] = WorkerGroup(
                self.executor, role, worker_class, place.devices, **keywords
            )
        for group in self.groups.values():
            group.ready()
        if self.placement.is_separated:
            self.groups["actor"] = self._join_actor(self.groups["actor"], self.groups["generator"])
        for role in wanted:
            self.groups[role] = self.groups[played_by(role, self.config)]

    def _join_actor(self, trainer: WorkerGroup, generator: WorkerGroup) -> SeparatedActor:
        from hybridrl.placement.separated_actor import SeparatedActor

        flow = self.config.placement
        store = flow.transport == "store" or (flow.transport == "auto" and flow.staleness > 1)
        return SeparatedActor(
            trainer, generator, staleness=flow.staleness, in_flight=flow.in_flight, store=store
        )

    def publish(self) -> None:
        """Has the next samples come from the newest weights, however old `placement.staleness`
        allows them to be."""
        if self.placement.is_separated:
            self.groups["actor"].publish()


def _make_directory(config: Config) -> RunDirectory:
    run = config.run
    if run.directory:
        return RunDirectory.at(Path(run.directory))
    return RunDirectory.create(Path(run.root), run.name)

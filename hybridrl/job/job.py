"""Job: everything that a driver program needs, built from a configuration.

with Job(load_config(["trainer.steps=40"])) as job:
    actor, reward = job.groups["actor"], job.groups["reward"]
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hybridrl.batch.call_record import FigureCheck
from hybridrl.checkpoint.ownership import FolderOwnership
from hybridrl.checkpoint.resume import find_resume_point
from hybridrl.checkpoint.run_state import (
    RunState,
    check_model_identity,
    describe_model_identity,
)
from hybridrl.checkpoint.store import resolve_checkpoint_folder
from hybridrl.checks.check_list import check
from hybridrl.checks.machine.placement_checks import resolve_roles
from hybridrl.composition.load import config_to_dict, format_config_yaml
from hybridrl.composition.secrets import redact_command_line
from hybridrl.config.schema import Config
from hybridrl.console.console_choice import progress_lines
from hybridrl.errors import (
    ConfigError,
    DataError,
    NotPlannedError,
    WorkerError,
)
from hybridrl.evaluation.eval_sets import resolve_eval_sets
from hybridrl.job.config_resolution import (
    KnownJob,
    apply_python_objects,
    place_roles,
    resolve_settings,
    with_date,
)
from hybridrl.job.device_pool import DevicePool
from hybridrl.job.job_inputs import LoadingProgress, load_job_inputs
from hybridrl.run_files.metric_writers import (
    MetricLog,
    MetricWriter,
    open_metric_writers,
    parse_trackers,
)
from hybridrl.run_files.recorded_steps import DriverActivity
from hybridrl.run_files.run_directory import RunDirectory, make_checkpoint_folder
from hybridrl.run_files.run_lock import RunLock
from hybridrl.run_files.run_paths import DATA_REPORT, REPORT, SETTINGS
from hybridrl.run_files.run_reader import RunReader
from hybridrl.run_files.run_status import RunStatus, classify_outcome
from hybridrl.system.garbage_collection import pause_garbage_collection
from hybridrl.trainers import load_trainer

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch
    from hybridrl.controller import BatchRef
    from hybridrl.controller.executor import Executor
    from hybridrl.system.locations import Location
    from hybridrl.trainers.data_feed import DataFeed
    from hybridrl.trainers.role_spec import RoleSpec
    from hybridrl.trainers.trainer import Trainer

_log = logging.getLogger(__name__)
UserFunction = Callable[..., Any]


class Job:
    """A run: its folder, model, data, executor and worker groups. Use it in a `with`.

    Everything that can be wrong with the settings is found before a worker is built.

    Args:
        config: See `load_config`.
        progress: Told what begins, for a person to read; None: a line each, on standard error or
            in the cell of a notebook.
        roles: Worker groups to build: names, of the trainer's roles or standard ones, or a mapping
            of names to `RoleSpec`s; None: those of the trainer.
        reward: A reward function, or several, in place of `reward.function`.
        data: Rows in place of `data.path`: a list of dictionaries, a `datasets.Dataset`, or a
            `Batch`. They are written to `data.parquet` of the run folder.
        trainer: A subclass of `hybridrl.trainers.trainer.Trainer`, in place of `trainer.name`.
        is_whole: The trainer is the whole program, so that reward functions can be held against
            the data, and tried, before workers start.
        bar: Told how much is done of how much, where what `progress` was told takes long.

    Attributes:
        directory: The run's files.
        resumed: What it goes on from.
        folder_owner: Of `checkpoint.folder`; None where checkpoints are in the run's folder.
        made_with: Which model and tokenizer it learns with, as its checkpoints record them.
        training, held_out: Tokenized data, of the kind that the trainer learns from.
        eval_sets: Further sets to evaluate on, by their names.
        examples: Prompts with right responses; None where the data has none.
        feed: Deals out `training`, step by step.
        sampling: How samples are drawn while training.
        executor: The devices.
        roles: What is said of each role.
        placement: Which role lives on which devices.
        plan: What that takes of each device; None if it cannot be planned.
        plan_notice: What a person has to know of the plan, or why there is none; else empty.
        remarks: What the user should know of the data, and what reward functions have to say before
            they start.
        settings_notices: What was chosen of the settings that were left open; see
            `config_resolution`.
        placement_notice: What `placement=auto` has chosen; else empty.
        groups: The worker groups, by role.
        beside: What is done beside the steps.
        command: The command line, without secrets.
        started: When this process began, seconds since the epoch.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[str], None] | None = None,
        roles: Sequence[str] | Mapping[str, RoleSpec] | None = None,
        *,
        reward: UserFunction | Sequence[UserFunction] | None = None,
        data: Any = None,
        trainer: type[Trainer] | None = None,
        is_whole: bool = False,
        bar: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        if progress is None:
            progress, bar = (view := progress_lines()).phase, view.phase_progress
        self._bar = bar
        self.started = psutil.Process().create_time()
        self.command = redact_command_line(sys.orig_argv)
        config = apply_python_objects(config, reward, data, trainer)
        self.config = config = with_date(config)
        self.name = _make_job_name()
        self._as_asked: Config | None = None
        self.beside = DriverActivity()
        self._is_whole = is_whole
        self.trainer_class = load_trainer(config.trainer.name)
        self.roles: Mapping[str, RoleSpec] = resolve_roles(config, roles)
        check(config, self.roles)
        self._opened = ExitStack()
        self._state: RunStatus | None = None
        try:
            self.directory = _make_run_directory(config)
            if config.run.private:
                self.directory.close_to_others()
                self._opened.callback(os.umask, os.umask(0o077))  # processes inherit it
            self._opened.enter_context(RunLock(self.directory.path))
            self._state = RunStatus(self.directory.path)
            if config.resume is None:  # else when it is known that the checkpoint fits
                self._state.begin()
            steps = resolve_checkpoint_folder(self.directory.path, config.checkpoint.folder)
            if config.checkpoint.folder is not None and isinstance(steps, Path):
                make_checkpoint_folder(steps)
                self._opened.enter_context(RunLock(steps, "checkpoint.folder"))
            if config.resume is not None or config.fork is not None:
                progress("looking for a checkpoint")
            self.resumed = find_resume_point(config, config_to_dict(config), self.roles)
            self.folder_owner = self._claim(steps)
            if data is not None:
                from hybridrl.data.job_data import with_rows

                self.config = config = with_rows(config, data, self.directory.path)
            self._keep_settings()
            self.checked = FigureCheck(lambda said: self.executor.notify(said))
            writers = open_metric_writers(
                parse_trackers(config.metrics),
                self.directory,
                config.run.name,
                config_to_dict(config),
            )
            for writer in writers:
                self._opened.callback(self._close_writer, writer)
            self.metrics = MetricLog(writers, self.checked)
            self._open(progress)
            self.directory.point_latest()
        except BaseException as error:
            self._end(error)
            raise

    def _claim(self, steps: Location) -> FolderOwnership | None:
        """Claim a checkpoint folder outside the run's folder for this run."""
        config = self.config
        if config.checkpoint.folder is None or not (config.checkpoint.wanted or config.resume):
            return None
        owner = FolderOwnership(steps, self.directory.path)
        owner.claim(resumes=config.resume is not None)
        self._opened.callback(owner.release)
        return owner

    def _open(self, progress: Callable[[str], None]) -> None:
        config = self.config
        progress("starting Ray and loading data" if config.executor == "ray" else "loading data")
        with pause_garbage_collection(), ThreadPoolExecutor(1) as beside:
            # Ray takes seconds to start, and so do the imports of data and model code. Ray's
            # processes end with the thread that started them, so that is this one.
            loading_progress = LoadingProgress(progress, self._bar)
            loading = beside.submit(self._load, loading_progress)
            try:
                self.executor = self._start_executor()
                loading.result()
            except BaseException:
                loading_progress.is_ended = True
                raise
        asked = self.config
        self.config, self.settings_notices = resolve_settings(asked, self._known())
        self._chosen = asked, self.config, len(self.executor.cluster.devices)
        if asked != self.config:
            self._keep_settings()
        self._place(progress)
        from hybridrl.job.worker_groups import check_injected_faults

        check_injected_faults(self)  # once: after a loss there may be fewer ranks than were planned
        self._build(progress)

    def _keep_settings(self) -> None:
        """Write the settings for later resumes. If this run itself resumes one, they are written
        when it is known that the checkpoint fits them."""
        if self.config.resume is None or self.resumed.folder is None:
            self.write_settings()

    def _known(self) -> KnownJob:
        """Return the facts by which settings that are left open are chosen."""
        from hybridrl.planner.step.step_calls import SampleLengths

        lengths = SampleLengths.alike(self.longest_prompt, self.longest_response)
        known = self.executor.cluster, self.roles, self.model_path, lengths
        return KnownJob(*known, self.training, self._done)

    @cached_property
    def _done(self) -> tuple[int, int]:
        """The numbers of the steps, and of their rows, before this job. Read once: later
        checkpoints may take the place of the one that it resumes from."""
        if self.resumed.folder is None:
            return 0, 0
        state = RunState.load(self.resumed.folder)
        return state.step, int(state.feed["numbered"])

    def _place(self, progress: Callable[[str], None]) -> None:
        """Place the roles on the devices of the cluster."""
        self.feed = self._make_feed()
        if self.config.placement.strategy == "auto":
            self._as_asked = self._as_asked or self.config
        lengths, known = self._usual_lengths, self._known()
        placed = place_roles(self.config, known, lengths, self.executor, self.directory, progress)
        self.config, self.placement, self.plan, self.plan_notice, self.placement_notice = placed

    def _build(self, progress: Callable[[str], None]) -> None:
        """Build the workers of the roles where they are placed."""
        count = len(self.executor.cluster.devices)
        progress(f"starting workers on {count} device{'s' if count > 1 else ''}")
        from hybridrl.job.worker_groups import build_worker_groups

        self.groups = build_worker_groups(self, self.executor)

    def restart(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Rebuild what a loss destroys: `executor`, `placement`, `plan`, `groups`, and `feed`,
        which starts from its beginning. The job gets as many devices as before, or fewer if
        `recover.min_devices` allows it. Earlier handles and batches become invalid.

        Raises:
            LostError: if something is lost meanwhile.
            WorkerError: if too few devices come back, or the job does not fit on them.
        """
        from hybridrl.system.shared_memory import remove_shared_memory

        self.executor.close()
        remove_shared_memory(self.name)
        self.name = _make_job_name()
        try:
            self._devices.wait_after_loss(progress)
            progress("starting other processes")
            self.executor = self._make_executor()
            self._choose_again()
            self._place(progress)
            self._build(progress)
        except ConfigError as error:
            raise WorkerError(f"The workers could not be started again: {error}") from error

    def _choose_again(self) -> None:
        """Choose the settings that are left open for the devices that there are now. Those chosen
        for more devices may not fit on fewer, or not divide them."""
        asked, first, devices = self._chosen
        if len(self.executor.cluster.devices) == devices:
            self.config = first
        else:
            self.config, self.settings_notices = resolve_settings(asked, self._known())

    def may_grow(self) -> bool:
        """Return whether a restart would bring devices back after the job continued with fewer."""
        return self._devices.may_grow()

    def keep_copies(self) -> Location | None:
        """Start a process on each node that keeps copies of checkpoints in its memory, and return
        the folder of the copies; None without `checkpoint.memory_copies`."""
        return self._devices.keep_copies()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for every call, raise failures whose handles nobody has waited for, and close. After
        an exception, close at once."""
        try:
            if error is None and self.executor.takes_calls:
                self.executor.settle()
        except BaseException as failed:
            error = failed
            raise
        finally:
            self._end(error)

    def put(self, batch: Batch) -> BatchRef:
        """Store a batch of the driver for the workers; see `Executor.put`."""
        return self.executor.put(batch)

    def next_batch(self) -> BatchRef:
        """Return the rows of the next step: prompts, numbered in the column `group_id`, or
        examples, or pairs."""
        return self.feed.next_batch()

    def next_examples(self, coefficient: float = 1.0) -> BatchRef:
        """Return prompts with reference responses for one supervised update of this weight."""
        return self.feed.next_examples(coefficient)

    def make_trainer(self) -> Trainer:
        """Build the driver program named by `trainer.name`."""
        trainer: Trainer = self.trainer_class(self.config, self.groups, self.sampling, self.feed)
        return trainer

    def accuracy(self) -> float:
        """Return the share of held-out prompts whose greedy response is correct.

        Raises:
            DataError: if there are no held-out prompts.
        """
        from hybridrl.evaluation.held_out_metrics import evaluate_responses

        if self.held_out is None:
            raise DataError(
                "There are no held-out prompts: the data is too small to spare any. Set "
                "data.eval_path."
            )
        actor, reward = self.groups["actor"], self.groups["reward"]
        held_out = self.put(self.held_out)
        figures, _ = evaluate_responses(actor, reward, held_out, self.sampling, self.config)
        return figures["accuracy"]

    def write_settings(self) -> None:
        """Write `config.yaml` for later resumes; from now on the folder belongs to this job."""
        if self._state is not None:
            self._state.begin()
        self.directory.write_text(SETTINGS, format_config_yaml(self._as_asked or self.config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics of a step to `metrics.jsonl` and the trackers; see `MetricLog.write`."""
        self.metrics.write(step, metrics)

    def close(self) -> None:
        """End the workers, and Ray if it was started here, and remove everything from shared
        memory. A part that fails to close does not keep the others from closing."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Record how the run ended, then close everything. The record comes first because closing
        may take long."""
        self._outcome, _ = classify_outcome(error)
        try:
            if self._state is not None and self._state.end(error):
                self._write_report()
        finally:
            self._opened.close()

    def _write_report(self) -> None:
        """Write the run as a page. No job fails for it."""
        try:
            from hybridrl.report.report_content import write_report

            write_report(RunReader(self.directory.path))
        except Exception as fault:  # what ends a job early may have left half an import behind
            _log.warning("%s was not written: %s", self.directory.path / REPORT, fault)

    def _close_writer(self, writer: MetricWriter) -> None:
        writer.close(self._outcome)

    def _start_executor(self) -> Executor:
        from hybridrl.system.shared_memory import remove_shared_memory, remove_stale_segments

        remove_stale_segments()
        self._opened.callback(lambda: remove_shared_memory(self.name))
        self._devices = DevicePool(self.config, self.roles, self.directory.path)
        self._opened.callback(self._devices.close)
        executor = self._make_executor()
        self._opened.callback(lambda: self.executor.close())
        return executor

    def _make_executor(self) -> Executor:
        return self._devices.executor()

    def _load(self, progress: Callable[[str], None]) -> None:
        """Load model folder, tokenizer and data, and derive what depends on their sizes."""
        from hybridrl.evaluation.loaded_sets import LoadedEvalSet
        from hybridrl.planner.computation_dtype import detect_device_kind, resolve_dtype
        from hybridrl.planner.job_start import preload_model_shapes
        from hybridrl.planner.sample_lengths import parse_sample_lengths
        from hybridrl.rollout import SamplingSettings

        config, rollout = self.config, self.config.rollout
        folder, said = self.directory.path, config.placement.lengths
        self._usual_lengths = (
            None if said is None else parse_sample_lengths(said, "placement.lengths")
        )
        whole = self._is_whole
        found = load_job_inputs(config, self.roles, folder, is_whole=whole, progress=progress)
        self.model_path, self.tokenizer_path = found.model_path, found.tokenizer_path
        self.tokenizer, rows = found.tokenizer, found.data
        self.training, self.held_out, self.examples = rows.training, rows.held_out, rows.examples
        self.longest_prompt, self.longest_response = rows.longest_prompt, rows.longest_response
        longest = self.longest_prompt + self.longest_response
        self.context_length = max(longest, found.longest_evaluated)
        self.remarks = found.remarks
        self.directory.write_json(DATA_REPORT, found.report)
        self.made_with = describe_model_identity(found.model.to_dict(), self.tokenizer)
        if self.resumed.folder is not None:
            check_model_identity(self.resumed.folder, self.made_with)
        self.sampling = SamplingSettings(
            rollout.max_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            tuple(rollout.stop),
            rollout.min_tokens,
            min_p=rollout.min_p,
        )
        self.eval_sets = {
            name: LoadedEvalSet(one, found.sets[name], self.sampling)
            for name, one in resolve_eval_sets(config).items()
        }
        model = replace(config.model, path=self.model_path)
        likely = resolve_dtype(replace(config, model=model), detect_device_kind(config.devices))
        with contextlib.suppress(NotPlannedError):  # told when the job is planned
            preload_model_shapes(likely, self.roles)

    def _make_feed(self) -> DataFeed:
        from hybridrl.trainers.data_feed import DataFeed

        kind = self.trainer_class.DATA
        rows = self.training, self.examples
        return DataFeed(self.config, kind, *rows, self.tokenizer, self.executor.put, self.beside)

    def publish(self) -> None:
        """Send the newest weights to the generator before the next samples, whatever age
        `placement.staleness` allows."""
        if self.placement.is_separated:
            self.groups["actor"].publish()


def _make_job_name() -> str:
    """Return a name for the workers' shared memory that later workers do not share."""
    return f"hybridrl-{os.getpid()}-{int(time.time())}"


def _make_run_directory(config: Config) -> RunDirectory:
    run = config.run
    if run.directory:
        return RunDirectory.at(Path(run.directory), resumes=config.resume is not None)
    return RunDirectory.create(Path(run.root), run.name)

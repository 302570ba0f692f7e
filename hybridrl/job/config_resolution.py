"""Every step that changes the settings of a job, in order.

`load_config` composes a command line, then takes the settings of the run that it resumes or forks.
`apply_python_objects` and `with_date` come before anything starts. When the devices are there and
the model is known, `resolve_settings` takes the steps of `RESOLUTIONS`, once; whoever resumes the
run finds what they have chosen in its `config.yaml`. `place_roles` is for each set of
devices that a run has: `config.yaml` keeps what was asked, for who goes on with others searches
again.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hybridrl.checkpoint.resume import AUTO, find_source
from hybridrl.checkpoint.stored_settings import load_stored
from hybridrl.composition import secrets
from hybridrl.composition.load import compose_config, load_run_config
from hybridrl.config.changed import apply_changes
from hybridrl.config.schema import Config
from hybridrl.config.task_settings import without_task
from hybridrl.errors import ConfigError, NotPlannedError
from hybridrl.run_files.run_paths import CLUSTER, PLACEMENT, SETTINGS
from hybridrl.system.formatting import format_seconds
from hybridrl.trainers import load_trainer, register_program

if TYPE_CHECKING:
    from hybridrl.batch.batch import Batch
    from hybridrl.controller.executor import Executor
    from hybridrl.placement import Placement
    from hybridrl.planner.job_plan import JobPlan
    from hybridrl.planner.step.step_calls import SampleLengths
    from hybridrl.run_files.run_directory import RunDirectory
    from hybridrl.system.cluster_spec import ClusterSpec
    from hybridrl.trainers.role_spec import RoleSpec
    from hybridrl.trainers.trainer import Trainer

_ABSENT = object()


def load_config(overrides: Sequence[str] = ()) -> Config:
    """Return the typed configuration of a job. With `resume` it is that of the resumed run, but for
    what the overrides say.

    Args:
        overrides: As on the command line, for example `["data=jsonl", "data.path=prompts.jsonl"]`
            or `["recipe=my.yaml"]`.

    Raises:
        ConfigError: for each unknown key (names the nearest), value of the wrong type, or value
            that has to be given; or if the run's settings cannot be read.
    """
    return apply_stored_settings(*compose_config(overrides))


def apply_stored_settings(config: Config, given_keys: Iterable[str]) -> Config:
    """Return the settings to run with: those of the run that is resumed or forked in place of
    everything that no override says.

    Args:
        config: As composed from the defaults and the overrides.
        given_keys: The dotted names of the settings that overrides and presets give.

    Raises:
        ConfigError: if the run's settings cannot be read.
    """
    if config.fork is not None and config.resume not in (None, AUTO):
        raise ConfigError(
            f"resume={config.resume} goes on with a run, and fork={config.fork} begins a new one. "
            "Leave one of them out."
        )
    if (source := find_source(config)) is None:
        return config
    given = OmegaConf.structured(secrets.reveal_secrets(config))
    try:
        stored = OmegaConf.create(load_stored(source.settings))
        found: Any = OmegaConf.merge(OmegaConf.structured(Config), stored)
        for key in given_keys:
            while True:
                value = OmegaConf.select(given, key, default=_ABSENT)
                group = key.rpartition(".")[0]
                if value is not _ABSENT and not (group and OmegaConf.select(found, group) is None):
                    break
                key = group  # that is null in one of the two, or has an option less
            OmegaConf.update(found, key, value, merge=False, force_add=True)
        merged: Any = OmegaConf.to_object(found)
        settings = secrets.mark_secrets(merged, found)
    except InterpolationResolutionError as error:
        raise ConfigError(
            f"{source.named}: {error.full_key} of that run was {str(error).splitlines()[0]}. Set "
            f"the variable, or give {error.full_key}=<value>."
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{source.named}: {source.settings} could not be read: {str(error).splitlines()[0]}. "
            "Bring it back from a copy; without it the settings of the run are not known."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{source.named}: {error}") from error
    secrets.check_redacted_secrets(settings, source.named)
    settings = secrets.copy_secret_references(settings, config)
    directory, checkpoint = config.run.directory, settings.checkpoint
    if source.forks:  # the new run must not write, nor remove, among the old one's
        checkpoint = replace(checkpoint, folder=config.checkpoint.folder)
    else:
        directory = directory or str(source.run)
    run = replace(settings.run, directory=directory)
    fork = config.fork or (None if source.forks else settings.fork)
    return replace(settings, resume=config.resume, fork=fork, run=run, checkpoint=checkpoint)


@dataclass(frozen=True)
class KnownJob:
    """The facts by which settings that are left open are chosen.

    Attributes:
        model_path: Where the model is, also a tiny one that the settings do not name.
        lengths: Of samples that are as long as the data and the settings let them be.
        training: Rows to learn from.
        done: Numbers of the steps, and of their rows, that a resumed run has behind it.
    """

    cluster: ClusterSpec
    roles: Mapping[str, RoleSpec]
    model_path: str
    lengths: SampleLengths
    training: Batch
    done: tuple[int, int] = (0, 0)

    def with_model(self, config: Config) -> Config:
        """Return the settings, with the tiny model's folder if they name none."""
        return replace(config, model=replace(config.model, path=self.model_path))


def resolve_steps(config: Config, job: KnownJob) -> tuple[Config, str]:
    """Compute `trainer.steps` where `trainer.epochs` is set; the last step may reach into the next
    epoch. Steps before a resume may have had another size."""
    if (epochs := config.trainer.epochs) is None:
        return config, ""
    # Further prompts of a step are not counted: nobody knows how many there will be.
    before, dealt = (0, 0) if config.algorithm.dynamic_sampling else job.done
    left = (epochs * len(job.training) - dealt) / config.data.prompts_per_step
    steps = max(1, before + math.ceil(round(left, 9)))
    said = f"trainer.epochs={epochs:g} of {len(job.training):,} rows: {steps:,} steps."
    return apply_changes(config, [("trainer.steps", steps)]), said


def resolve_dtype(config: Config, job: KnownJob) -> tuple[Config, str]:
    """Choose `model.dtype` where it is `auto`; the notice tells of a surprise."""
    from hybridrl.planner.computation_dtype import format_dtype_notice, resolve_dtype

    dtype = resolve_dtype(job.with_model(config), job.cluster.kind).model.dtype
    found = replace(config, model=replace(config.model, dtype=dtype))
    return found, format_dtype_notice(config, found, job.cluster.kind)


def resolve_automatic_settings(config: Config, job: KnownJob) -> tuple[Config, str]:
    """Choose the settings that are left to the planner."""
    from hybridrl.planner.fitting_settings import choose_automatic_settings, format_settings
    from hybridrl.planner.machine.device_catalog import add_device_memory

    described = job.with_model(config)
    chosen = choose_automatic_settings(
        described, add_device_memory(job.cluster), job.lengths, job.roles
    )
    said = f"Chosen: {', '.join(format_settings(chosen))}." if chosen else ""
    return apply_changes(config, chosen or ()), said


def resolve_prompt_order(config: Config, job: KnownJob) -> tuple[Config, str]:
    """Choose `data.order` where it is `auto`, and say what the order of prefixes gains. vLLM keeps
    prefixes on GPUs anyway; on CPUs for that order alone, unless experts are recorded, which nobody
    knows of cached tokens."""
    data, rollout = config.data, config.rollout
    if data.order == "random":
        return config, ""
    from hybridrl.checks.settings.rollout_checks import find_order_obstacle
    from hybridrl.data.prefix_order import BLOCK_TOKENS, compare_orders

    pays, said = False, find_order_obstacle(config)
    if not said:
        response = rollout.samples_per_prompt * rollout.max_tokens
        limits = data.prompts_per_step, data.max_shuffle_error, config.run.seed
        pays, said = compare_orders(job.training, response, *limits)
    order = "prefix" if pays or data.order == "prefix" else "random"
    changes: list[tuple[str, Any]] = [("data.order", order)]
    if order == "prefix" and job.cluster.kind == "cpu" and not rollout.routing_replay:
        options = {"enable_prefix_caching": True, "block_size": BLOCK_TOKENS}
        changes.append(("rollout.engine_options", options | rollout.engine_options))
    return apply_changes(config, changes), f"data.order={order}: {said}."


RESOLUTIONS = (resolve_steps, resolve_dtype, resolve_automatic_settings, resolve_prompt_order)


def resolve_settings(config: Config, job: KnownJob) -> tuple[Config, list[str]]:
    """Return the settings after all `RESOLUTIONS`, and what to tell the user of each."""
    notices = []
    for resolve in RESOLUTIONS:
        config, notice = resolve(config, job)
        notices.append(notice)
    return config, notices


class PlacedRoles(NamedTuple):
    """The roles of a job in their places.

    Attributes:
        config: The settings, with those that a search chose.
        placement: Which role lives on which devices.
        plan: What that takes of each device; None if it cannot be planned.
        plan_notice: What a person has to know of the plan, or why there is none; else empty.
        placement_notice: What `placement=auto` has chosen; else empty.
    """

    config: Config
    placement: Placement
    plan: JobPlan | None
    plan_notice: str
    placement_notice: str = ""


def place_roles(
    config: Config,
    known: KnownJob,
    usual: SampleLengths | None,
    executor: Executor,
    directory: RunDirectory,
    progress: Callable[[str], None],
) -> PlacedRoles:
    """Place the roles on the devices of the cluster, as the settings say or as a search chooses,
    together with the settings that belong to its choice. Write cluster and placement to the run's
    folder.

    Args:
        usual: The lengths of usual samples, if they are known.
    """
    from hybridrl.checks.machine.placement_checks import resolve_placement
    from hybridrl.planner.fitting_settings import format_settings
    from hybridrl.planner.job_start import UNPLANNED, plan_starting_job, search_placement
    from hybridrl.planner.machine.device_catalog import add_device_memory

    directory.write_text(CLUSTER, add_device_memory(known.cluster).to_json() + "\n")
    described = known.with_model(config)
    if config.placement.strategy == "auto":
        from hybridrl.systems.operator_costs.cost_source import offer_costs

        progress("searching for a placement")
        offer_costs()
        best = search_placement(described, executor, known.lengths, known.roles, usual).best[0]
        directory.write_text(PLACEMENT, best.to_json() + "\n")
        said = (
            f"placement=auto chose {best.found.shape}: a step of about "
            f"{format_seconds(best.seconds)}, with samples "
            + ("as long as they may be." if usual is None else f"of {usual} tokens.")
        )
        source = f"Times are by {best.times.source}."
        notice = " ".join([said, source, *format_settings(best.settings)])
        config, plan = apply_changes(config, best.settings), best.plan
        return PlacedRoles(config, best.placement, plan, plan.notice, notice)
    placement = resolve_placement(config, known.cluster, known.roles)
    directory.write_text(PLACEMENT, placement.to_json() + "\n")
    try:
        plan = plan_starting_job(described, known.cluster, placement, known.lengths, known.roles)
    except NotPlannedError as error:
        return PlacedRoles(config, placement, None, UNPLANNED.format(error=error))
    return PlacedRoles(config, placement, plan, plan.notice)


def apply_python_objects(
    config: Config,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    data: Any,
    trainer: type[Trainer] | None,
) -> Config:
    """Return the settings with the given Python objects in place of names.

    Raises:
        ConfigError: if one is not of its kind.
    """
    if reward is not None:
        functions = [reward] if callable(reward) else reward
        if not isinstance(functions, Sequence) or not all(map(callable, functions)):
            raise ConfigError(f"Job(reward={reward!r}): must be a function, or a list of them.")
        config = replace(config, reward=replace(config.reward, function=functions))
    if data is not None:
        config = without_task(config)
        config = replace(config, data=replace(config.data, path="data.parquet", split=None))
    if trainer is not None:
        if not isinstance(trainer, type):
            raise ConfigError(
                f"Job(trainer={trainer!r}): must be a class. Names go into the settings: "
                "trainer.name=..."
            )
        config = replace(config, trainer=replace(config.trainer, name=register_program(trainer)))
    return config


def with_date(config: Config) -> Config:
    """Return the settings with a date if they have none: today's, or for an evaluation of a run's
    model that run's, so that it reads the prompts that the run did."""
    if config.data.date is not None:
        return config
    found = None
    if config.model.path is not None and not load_trainer(config.trainer.name).TRAINS:
        found = _date_of_run(Path(config.model.path))
    date = found or datetime.date.today().isoformat()
    return replace(config, data=replace(config.data, date=date))


def _date_of_run(model: Path) -> str | None:
    """Return the date of the run in whose folder, or in that of a step, a model is; None outside of
    runs."""
    for folder in model.absolute().parents[:3]:
        if (folder / SETTINGS).is_file():
            try:
                return load_run_config(folder / SETTINGS).data.date
            except ConfigError:
                return None
    return None

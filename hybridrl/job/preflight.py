"""What a job begins with, looked at without starting anything: all that is wrong is told at once.

`load_inputs` is how every job begins; `preflight` does what else a start looks at before it has
workers, for `run.dry` and `hybridrl plan`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.resume import find_checkpoint
from hybridrl.checks.data.reward_data_checks import check_rewards
from hybridrl.checks.data.row_checks import check_rubrics, check_teachers
from hybridrl.checks.data.row_tests import check_tests
from hybridrl.checks.machine.placement_checks import check_placement, wanted_roles
from hybridrl.checks.models import model_folder_checks as model_folder
from hybridrl.checks.models.hub_checks import check_reachable
from hybridrl.checks.models.tokenizer_checks import check_tokenizer, remark_on_ends
from hybridrl.checks.settings.environment_checks import check_template
from hybridrl.checks.settings.evaluation_checks import check_sets
from hybridrl.checks.settings.job_checks import check, devices_here, lacks_model
from hybridrl.checks.settings.role_checks import check_models, model_of
from hybridrl.config.eval_sets import needs_held_out
from hybridrl.config.load import to_plain
from hybridrl.config.schema import Config
from hybridrl.data import data_files as files
from hybridrl.data.duplicates import DataReport
from hybridrl.data.environment_tasks import ENVIRONMENT
from hybridrl.data.refused_rows import checked_by, collected
from hybridrl.data.row_schedule import deck_of
from hybridrl.data.samplers import BUILT_IN
from hybridrl.environments.rows import probe
from hybridrl.errors import ConfigError, Problems
from hybridrl.job import job_inputs as inputs
from hybridrl.planner.sample_lengths import read_lengths
from hybridrl.run_files.metric_writers import check_packages, trackers_of
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.system.cluster_spec import Cluster
from hybridrl.trainers import load_trainer
from hybridrl.trainers.role_spec import RoleSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Inputs:
    """What a job is built from.

    Attributes:
        model_path: Of the policy; a tiny model's folder where the settings name none.
        model: Its configuration.
        tokenizer_path, tokenizer: That all roles share.
        rows: The data, tokenized.
        remarks: What the user should know of the data, and what reward functions have to say before
            they start.
        report: What the data repeats, for `data-report.json`.
    """

    model_path: str
    model: PretrainedConfig
    tokenizer_path: str
    tokenizer: Any
    rows: inputs.Rows
    remarks: list[str] = field(default_factory=list)
    report: Mapping[str, Any] = field(default_factory=dict)


def load_inputs(
    config: Config,
    roles: Mapping[str, RoleSpec],
    folder: Path,
    *,
    is_whole: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Inputs:
    """Model folder, tokenizer and data, and whether they fit each other and the settings.

    Args:
        folder: Of the run: a tiny model is made in it.
        is_whole: The trainer is the whole program. Programs of the user's may add columns before
            they ask for rewards, so that nothing can be said of reward functions.
        progress: Told what takes long.

    Raises:
        HybridRLError: with everything that is wrong with them.
    """
    from hybridrl.models import load_config, load_tokenizer, trained_parts
    from hybridrl.models.lora import check_targets

    trainer = load_trainer(config.trainer.name)
    kind = trainer.DATA
    problems = Problems()
    model = tokenizer = rows = None
    remarks: list[str] = []
    report = DataReport({}, [])
    for setting, place in _places(config, roles):
        with problems.noted():
            check_reachable(place, setting)
    path = named = config.model.tokenizer or ""
    if not problems:
        with problems.noted():
            path = inputs.model_folder(config, folder)
            model = load_config(path)
            check_targets(model, config.actor.lora)
            if trainer.TRAINS:
                adapters = config.actor.lora.rank is not None
                remarks += filter(None, [trained_parts(path, model, adapters=adapters)])
        with problems.noted():
            named = config.model.tokenizer or path
            tokenizer = load_tokenizer(named) if named else None
    if tokenizer is None and config.data.path is not None:
        with problems.noted():
            files.check_path(config.data.path, config.data.split)
    if tokenizer is not None:
        with problems.noted():
            inputs.check_tokenizers(config, roles, tokenizer, named)
        with problems.noted():
            if model is not None:
                check_tokenizer(config, tokenizer, model, path)
                if config.data.chat is not False and (said := remark_on_ends(path, tokenizer)):
                    remarks.append(said)
            check_template(config, tokenizer)
            with collected() as refused, checked_by(check_tests(config, progress)):
                rows = inputs.load_rows(config, kind, tokenizer)
    if config.environment.name is not None and config.data.task != ENVIRONMENT:
        with problems.noted():  # whose own tasks would have loaded it
            probe(config.environment)
    if rows is not None:
        with problems.noted():
            inputs.check_by_column(config, rows.held_out)
        remarks += inputs.remarks_on(config, kind, rows)
        report = inputs.report_on_rows(config, kind, rows, tokenizer)
        if refused:
            report.figures["left_out"] = {one.place: one.figures() for one in refused}
        remarks += report.remarks
        with problems.noted():
            inputs.check_normalise_by(config, rows.training)
            if config.data.sampler in BUILT_IN or config.data.sources:
                deck_of(config, rows.training)
    if rows is not None and model is not None:
        with problems.noted():
            inputs.check_lengths(config, kind, rows, model)
    if rows is not None and is_whole and trainer.__module__.startswith("hybridrl."):
        if needs_held_out(config, trainer.TRAINS) or trainer.TRAINS:
            with problems.noted():
                remarks += check_rewards(config, rows.training, rows.held_out)
        with problems.noted():
            check_teachers(config, rows.training)
        with problems.noted():
            check_rubrics(config, rows.training)
        with problems.noted():
            remarks += check_sets(config, rows.sets)
    problems.raise_if_any()
    assert model is not None and rows is not None
    return Inputs(path, model, named, tokenizer, rows, remarks, report.figures)


def preflight(
    config: Config,
    problems: Problems,
    *,
    plans: bool = False,
    places: bool = False,
    is_elsewhere: bool = False,
) -> list[str]:
    """Runs every check of a start that needs neither workers nor devices; leaves nothing behind.

    Args:
        problems: Gets what is wrong.
        plans: A model may be a `config.json` without weights and tokenizer.
        places: The job is also placed and planned on the devices that it gets on this machine.
        is_elsewhere: The job is for other machines, where models and data may lie.

    Returns:
        What could not be looked at, and remarks on data and reward functions, as sentences.
    """
    with problems.noted():  # as `run.dry`: devices are looked at by who knows which
        check(replace(config, run=replace(config.run, dry=True)))
    with problems.noted():
        check_packages(trackers_of(config.metrics))
    with problems.noted():
        if config.placement.lengths is not None:
            read_lengths(config.placement.lengths, "placement.lengths")
    with problems.noted():
        RunDirectory.check(config.run.directory, config.run.root, config.resume is not None)
    unseen = _unseen(config, plans, is_elsewhere)
    remarks: list[str] = []
    # What comes of wrong settings beyond the sentences on them is no news.
    with contextlib.suppress(Exception) if problems else contextlib.nullcontext():
        roles = wanted_roles(config, None)
        models, data = Problems(), config.data
        with models.noted():
            check_models(config, roles, unseen)
        with problems.noted():
            models.raise_if_any()
        with problems.noted():
            find_checkpoint(config, to_plain(config), roles)
        if not unseen and not models and not lacks_model(config):
            with _scratch() as folder, problems.noted():
                found = load_inputs(config, roles, folder, is_whole=True)
                remarks += found.remarks
                if places and not problems:
                    remarks += _plan(config, roles, found)
        elif data.path is not None and data.path not in unseen:
            with problems.noted():
                files.check_path(data.path, data.split)
        if places and unseen and not problems:
            with problems.noted():
                unseen["places"] = " ".join(_plan(config, roles, None))
    said = ["So the data was not read, either."] if unseen else remarks
    return [*unseen.values(), *said]


def _plan(config: Config, roles: Mapping[str, RoleSpec], found: Inputs | None) -> list[str]:
    """Places the job and, where its model and data are here, plans it; what could not be checked.

    Raises:
        ConfigError: if a start would be refused for its placement or its plan.
    """
    from hybridrl.planner.computation_dtype import with_dtype
    from hybridrl.planner.job_start import plan_ahead
    from hybridrl.planner.step.step_calls import Lengths

    devices = devices_to_check(config)
    if devices is None:
        return ["The placement was not checked: its devices are not on this machine."]
    if found is None:
        check_placement(config, devices)
        return []
    config = replace(config, model=replace(config.model, path=found.model_path))
    config = with_dtype(config, devices.kind)
    check_placement(config, devices)
    rows = found.rows
    longest = Lengths.alike(rows.longest_prompt, rows.longest_response)
    return plan_ahead(config, devices, longest, roles)


def _places(config: Config, roles: Mapping[str, RoleSpec]) -> set[tuple[str, str]]:
    """Settings and values that name models or tokenizers."""
    found = {model_of(config, role, spec) for role, spec in roles.items()}
    found.add(("model.tokenizer", config.model.tokenizer))
    return {(setting, path) for setting, path in found if path is not None}


def devices_to_check(config: Config) -> Cluster | None:
    """Those of this machine; where it has fewer than are asked for, so many imagined ones, for a
    recipe may be looked at on a laptop; None where only a cluster can say."""
    if config.ray.address is not None and config.num_devices is None:
        return None
    try:
        return devices_here(config)
    except ConfigError:
        if config.num_devices is None or config.num_devices < 1:
            return None
        kind = "cpu" if config.devices == "cpu" else "cuda"
        return Cluster.of_one_node(kind, config.num_devices)


def _unseen(config: Config, plans: bool, is_elsewhere: bool) -> dict[str, str]:
    """Models and data that cannot be looked at here, and why, as sentences by their paths."""
    named = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    named["data.path"] = config.data.path
    if not config.data.task:
        named["data.eval_path"] = config.data.eval_path
    for name, one in config.eval.sets.items():
        data = one.get("data") if isinstance(one, Mapping) else None
        named[f"eval.sets.{name}.data.path"] = (
            data.get("path") if isinstance(data, Mapping) else None
        )
    for role, settings in config.models.items():
        if isinstance(settings, Mapping):
            named[f"models.{role}.path"] = settings.get("path")
    for kind, scores in (("reward", config.reward), ("cost", config.cost)):
        if scores is not None:
            named |= {f"{kind}.model": scores.model, f"{kind}.judge.path": scores.judge.path}
    found = {}
    for setting, path in named.items():
        if path is None:
            continue
        is_described = False
        looks = files if setting.startswith(("data.", "eval.")) else model_folder
        place = Path(path).expanduser()
        if place.exists():
            has_config = plans and (place / "config.json").is_file()
            is_described = has_config and not model_folder.has_weights(place)
            why = "it has no weights" if is_described else ""
        elif not looks.may_be_on_hub(path):
            why = "it is not on this machine" if is_elsewhere else ""
        else:
            why = "it is no file or folder here"
        if why:
            found[path] = f"{setting}={path} was not looked at: {why}."
        if is_described and (refused := model_folder.refusal_of_quantised(path, setting)):
            found[path] += f" A start would refuse it: {refused}"
    return found


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hybridrl-preflight-") as folder:
        yield Path(folder)

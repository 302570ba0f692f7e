"""Checks of a start that need no workers, for `run.dry` and `hybridrl plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridrl.checks.check_list import Need, run_checks
from hybridrl.checks.machine.device_checks import build_preflight_cluster
from hybridrl.checks.machine.placement_checks import resolve_placement, resolve_roles
from hybridrl.checks.models import model_folder_checks
from hybridrl.checks.settings.job_checks import lacks_model
from hybridrl.checks.settings.role_checks import check_role_models
from hybridrl.composition.load import config_to_dict
from hybridrl.config.changed import read_setting
from hybridrl.config.role_models import list_model_paths
from hybridrl.config.schema import Config
from hybridrl.data import data_files
from hybridrl.errors import ErrorCollector
from hybridrl.job.job_inputs import JobInputs, load_job_inputs
from hybridrl.planner.sample_lengths import parse_sample_lengths
from hybridrl.system.hub_access import may_be_hub_name
from hybridrl.trainers.role_spec import RoleSpec


def run_preflight(
    config: Config, *needs: Need, plans: bool = False, is_elsewhere: bool = False
) -> list[str]:
    """Check what a start would refuse, as far as that needs neither workers nor devices; leave
    nothing behind.

    Args:
        needs: What is looked at besides the settings, the models and the data.
        plans: A model may be a `config.json` without weights and tokenizer.
        is_elsewhere: The job is for other machines, where models and data may lie.

    Returns:
        What could not be looked at, and remarks on data and reward functions, as sentences.

    Raises:
        HybridRLError: with all that is wrong.
    """
    problems, data = ErrorCollector(), config.data
    run_checks(problems, Need.SETTINGS, config=config)
    with problems.noted():
        if config.placement.lengths is not None:
            parse_sample_lengths(config.placement.lengths, "placement.lengths")
    unseen = _find_unavailable_inputs(config, plans, is_elsewhere)
    remarks: list[str] = []
    # What comes of wrong settings beyond the sentences on them is no news.
    with contextlib.suppress(Exception) if problems else contextlib.nullcontext():
        roles = resolve_roles(config, None)
        models, places = ErrorCollector(), Need.MACHINE in needs
        with models.noted():
            check_role_models(config, roles, unseen)
        with problems.noted():
            models.raise_if_any()
        if Need.FOLDER in needs:
            plain = config_to_dict(config)
            run_checks(problems, Need.FOLDER, config=config, roles=roles, plain_settings=plain)
        if not unseen and not models and not lacks_model(config):
            with TemporaryDirectory(prefix="hybridrl-preflight-") as folder, problems.noted():
                found = load_job_inputs(config, roles, Path(folder), is_whole=True)
                remarks += found.remarks
                if places and not problems:
                    remarks += _plan(config, roles, found)
        elif data.path is not None and data.path not in unseen:
            with problems.noted():
                data_files.find_data_files(data.path, data.split)
        if places and unseen and not problems:
            with problems.noted():
                unseen["places"] = " ".join(_plan(config, roles, None))
    problems.raise_if_any()
    said = ["So the data was not read, either."] if unseen else remarks
    return [*unseen.values(), *said]


def _plan(config: Config, roles: Mapping[str, RoleSpec], found: JobInputs | None) -> list[str]:
    """Place the job, and plan it if its model and data are here; return what could not be checked.

    Raises:
        ConfigError: if a start would be refused for its placement or its plan.
    """
    from hybridrl.planner.computation_dtype import resolve_dtype
    from hybridrl.planner.job_start import plan_ahead
    from hybridrl.planner.step.step_calls import SampleLengths

    devices = build_preflight_cluster(config)
    if devices is None:
        return ["The placement was not checked: its devices are not on this machine."]
    if found is None:
        resolve_placement(config, devices)
        return []
    config = replace(config, model=replace(config.model, path=found.model_path))
    config = resolve_dtype(config, devices.kind)
    resolve_placement(config, devices)
    longest = SampleLengths.alike(found.data.longest_prompt, found.data.longest_response)
    return plan_ahead(config, devices, longest, roles)


def _find_unavailable_inputs(config: Config, plans: bool, is_elsewhere: bool) -> dict[str, str]:
    """Return a sentence for each model or data path that cannot be read here, by path."""
    named = list_model_paths(config)
    named["data.path"] = config.data.path
    if not config.data.task:
        named["data.eval_path"] = config.data.eval_path
    for name, one in config.eval.sets.items():
        named[f"eval.sets.{name}.data.path"] = read_setting(one, "data.path")
    found = {}
    for setting, path in named.items():
        if path is None:
            continue
        is_described = False
        is_data = setting.startswith(("data.", "eval."))
        may_be_name = data_files.may_be_dataset_name if is_data else may_be_hub_name
        place = Path(path).expanduser()
        if place.exists():
            has_config = plans and (place / "config.json").is_file()
            is_described = has_config and not model_folder_checks.has_weights(place)
            why = "it has no weights" if is_described else ""
        elif not may_be_name(path):
            why = "it is not on this machine" if is_elsewhere else ""
        else:
            why = "it is no file or folder here"
        if why:
            found[path] = f"{setting}={path} was not looked at: {why}."
        if is_described and (refused := model_folder_checks.refusal_of_quantised(path, setting)):
            found[path] += f" A start would refuse it: {refused}"
    return found

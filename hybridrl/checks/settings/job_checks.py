"""Checks of a job's settings beyond their types."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hybridrl.algorithms.policy_objective import find_policy_loss
from hybridrl.checks.data.reward_data_checks import resolve_scored_sources
from hybridrl.checks.machine.device_checks import check_min_devices
from hybridrl.checks.models.model_folder_checks import check_generator
from hybridrl.config.model_schema import AUTO_SCHEDULE
from hybridrl.config.schema import Config, is_served
from hybridrl.config.setting import Setting
from hybridrl.data.mixture import parse_sources
from hybridrl.data.samplers import BUILT_IN_SAMPLERS, check_sampler
from hybridrl.errors import VLLM_INSTALL, ConfigError, MissingPackageError, pip_install
from hybridrl.evaluation.eval_sets import needs_held_out_rows
from hybridrl.rewards.loading import check_reward_functions, parse_function_list, resolve_functions
from hybridrl.rewards.options import FunctionSettings
from hybridrl.run_files.metric_writers import check_tracker_packages, parse_trackers
from hybridrl.trainers import load_roles, load_trainer


def _check_program_settings(config: Config) -> None:
    if config.model.dtype == "float16" and load_trainer(config.trainer.name).TRAINS:
        raise ConfigError(
            "model.dtype=float16: small gradients would become 0 in it, the more the fewer devices "
            "there are, because nothing scales the loss. Set model.dtype=bfloat16, or float32."
        )
    check_sampler(config)
    sampler, learns = config.data.sampler, load_trainer(config.trainer.name).DATA
    if sampler in BUILT_IN_SAMPLERS and learns != "prompts":
        raise ConfigError(
            f"data.sampler={sampler} goes by what samples score, and trainer.name="
            f"{config.trainer.name} learns from {learns}, which have no scores. Leave it out."
        )
    find_policy_loss(config.algorithm.policy_loss)


def _check_data_source(config: Config) -> None:
    data = config.data
    if data.sources and (data.task is not None or data.path is not None):
        other = f"path={data.path}" if data.path is not None else f"task={data.task}"
        raise ConfigError(
            f"data.sources={', '.join(data.sources)} and data.{other} are set. "
            "Write data=mixture, and put what is to be learned into the sources."
        )
    has_rows = data.task is not None or data.path or data.sources
    if not has_rows and _reads_rows(config):
        raise ConfigError(
            "There are no prompts: set data=jsonl data.path=<file, folder or data set>, "
            "data=arithmetic, or data=mixture with data.sources.<name>.path=<file> for each source."
        )
    if data.task is not None and data.path:
        raise ConfigError(
            f"Both data.task={data.task} and data.path={data.path} are set. Write data=jsonl to "
            "read the file, or leave data.path out."
        )
    tasks = [source.data.task for source in parse_sources(data)] or [data.task]
    supervised = {
        "warmup.steps": config.warmup.steps,
        "algorithm.ptx_coefficient": config.algorithm.ptx_coefficient,
    }
    for setting, value in supervised.items():
        if value and not any(tasks):
            raise ConfigError(
                f"{setting}={value}, but supervised learning needs a built-in task (data.task), "
                f"whose answers are known. Set {setting}=0."
            )
    if lacks_model(config):
        raise ConfigError(
            "model.path is not set. The tiny model that is made without it knows only the "
            "characters of a built-in task; set model.path=<folder or hub name>."
        )


def _reads_rows(config: Config) -> bool:
    """Return whether the job learns from, or is evaluated on, rows of `data`, not of `eval.sets`
    alone."""
    trains = load_trainer(config.trainer.name).TRAINS
    return trains or needs_held_out_rows(config, trains)


def lacks_model(config: Config) -> bool:
    """Return whether no model is named although some prompts come from neither a built-in task nor
    an environment."""
    tasks = [source.data.task for source in parse_sources(config.data)] or [config.data.task]
    return None in tasks and config.model.path is None and config.environment.name is None


def _check_inline_devices(config: Config) -> None:
    if config.executor == "inline" and (config.num_devices or 1) > 1:
        raise ConfigError(
            f"num_devices={config.num_devices}: executor=inline runs on one device, in the "
            "driver's process. Set num_devices=1, or executor=ray."
        )


def _check_reward_settings(config: Config) -> None:
    kinds = [spec.worker for spec in load_roles(config).values()]
    for kind in ("reward", "cost"):
        settings = getattr(config, kind)
        if kind not in kinds or settings is None:  # a cost that is missing `check_algorithm` misses
            continue
        judge = settings.judge
        if judge.path:
            check_generator(judge.path, f"{kind}.judge.path")
        if judge.template and not Path(judge.template).is_file():
            raise ConfigError(f"{kind}.judge.template={judge.template}: there is no such file.")
        if judge.path and judge.context <= judge.max_tokens:
            raise ConfigError(
                f"{kind}.judge.context={judge.context} leaves no room beside "
                f"{kind}.judge.max_tokens={judge.max_tokens}."
            )
        # A model, a judge, an episode or an environment may give all the reward there is.
        played = config.rollout.episode or is_served(config.rollout, config.environment)
        played = played or config.data.task == "environment"  # whose name is missed elsewhere
        played = played and config.environment.name != "mcp"  # which rewards nothing by itself
        for source, one in resolve_scored_sources(config, kind).items():
            every, weights = resolve_functions(one)
            watched = len(every) - len(parse_function_list(one.function))
            if every or not (settings.model or judge.path or played):
                named = FunctionSettings.of(Setting(kind), source)
                check_reward_functions(every, weights, one.options, watched, named)


def _check_packages(config: Config) -> None:
    generates = any(spec.generates for spec in load_roles(config).values())
    is_vllm, has_lora = config.rollout.engine == "vllm", config.actor.lora.rank is not None
    searches = config.actor.optimizer.schedule == AUTO_SCHEDULE
    for package, is_needed, command, instead in (
        ("ray", config.executor == "ray", pip_install("ray"), "executor=inline"),
        ("vllm", generates and is_vllm, VLLM_INSTALL, "rollout=transformers"),
        ("peft", has_lora, pip_install("peft"), "actor.lora.rank=null"),
        ("sklearn", searches, pip_install("scikit-learn"), "actor.optimizer.schedule=constant"),
    ):
        if is_needed and importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{package} is not installed: {command}. To do without it: {instead}."
            )


def _check_trackers(config: Config) -> None:
    check_tracker_packages(parse_trackers(config.metrics))


JOB_CHECKS = (
    _check_program_settings,
    _check_data_source,
    _check_inline_devices,
    check_min_devices,
    _check_reward_settings,
    _check_packages,
    _check_trackers,
)

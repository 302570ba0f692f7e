"""Runs a job of these settings: trains a model, or evaluates one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ahead of the imports that take time: Ctrl-C among them is no traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hybridrl import __version__
from hybridrl.cli import COMMANDS, print_error
from hybridrl.composition.load import format_effective_yaml
from hybridrl.composition.overrides import expand_sweep
from hybridrl.config.effective_settings import find_ineffective_settings
from hybridrl.config.schema import Config
from hybridrl.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    ConfigError,
    HybridRLError,
    PreemptionInterrupt,
)
from hybridrl.job.config_resolution import load_config
from hybridrl.run.signals import SignalHandler, exit_after_signal
from hybridrl.system.redaction import redact_output, register_secrets

if TYPE_CHECKING:
    from hybridrl.console.run_view import RunView
    from hybridrl.job.job import Job, UserFunction
    from hybridrl.trainers.trainer import Trainer


def main() -> None:
    """Parse the command line, and run the job or jobs."""
    redact_output()
    for argument in sys.argv[1:]:
        register_secrets(argument)
    chosen, further = _build_parser().parse_known_intermixed_args()
    try:
        if __name__ == "__main__" and callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _reject_commands(chosen.settings)
        _reject_unknown_flags(further)
        if chosen.cfg:
            _print_settings(load_config(chosen.settings))
        elif chosen.multirun:
            for config in [load_config(overrides) for overrides in expand_sweep(chosen.settings)]:
                run(config)
        else:
            run(load_config(chosen.settings))
    except PreemptionInterrupt:
        exit_after_signal(EXIT_PREEMPTED)
    except KeyboardInterrupt:
        exit_after_signal(EXIT_INTERRUPTED)
    except HybridRLError as error:
        _print_error(error)
        sys.exit(error.exit_code)


def run(
    config: Config,
    *,
    reward: UserFunction | Sequence[UserFunction] | None = None,
    data: Any = None,
    trainer: type[Trainer] | None = None,
) -> dict[str, Any]:
    """Run one job to its end, and return its summary.

    Args:
        config: See `load_config`.
        reward, data, trainer: Python objects in place of names in the settings, as of `Job`.

    Raises:
        HybridRLError: a sentence that says what is wrong.
        KeyboardInterrupt: after Ctrl-C, when what there was has been saved.
        PreemptionInterrupt: after SIGTERM, when the run can go on from a checkpoint.
    """
    from hybridrl.data.job_data import with_rows
    from hybridrl.job.config_resolution import apply_python_objects

    config = apply_python_objects(config, reward, data, trainer)
    if config.run.dry:
        with TemporaryDirectory() as folder:
            _run_dry(config if data is None else with_rows(config, data, Path(folder)))
        return {}
    from hybridrl.checks.settings.role_checks import find_ineffective_caches
    from hybridrl.checks.settings.training_checks import find_ineffective_encodings
    from hybridrl.console.console_choice import make_console
    from hybridrl.job.job import Job
    from hybridrl.run.loop import RunLoop
    from hybridrl.run_files.final_sentence import format_final_sentence, resolve_accuracy_name
    from hybridrl.systems.low_bits.precision_plan import list_precision_notices
    from hybridrl.trainers import load_trainer
    from hybridrl.trainers.objectives import format_correction_notice
    from hybridrl.trainers.policy_trainer import list_kl_notices

    def end_now(signal: str) -> None:
        view.message(f"{signal}: ended before the first step.")
        raise PreemptionInterrupt(signal) if config.checkpoint.wanted else KeyboardInterrupt(signal)

    kind, name = config.trainer.name, config.run.name
    title = f"HybridRL {kind}" if name == kind else f"HybridRL {kind}: {name}"
    steps = config.trainer.steps if load_trainer(config.trainer.name).TRAINS else 0
    terminated = EXIT_PREEMPTED if config.checkpoint.wanted else EXIT_INTERRUPTED
    with (
        # To the very end, also while Ray and the console close.
        SignalHandler(config.recover, terminated) as interrupts,
        make_console(
            steps, title, accuracy=resolve_accuracy_name(config.reward, short=True)
        ) as view,
    ):
        interrupts.on_terminate = end_now
        with (
            Job(config, view.phase, data=data, is_whole=True, bar=view.phase_progress) as job,
            _report_error_before_closing(view, interrupts),
        ):
            # It brings in the libraries of the models, which the job imports while Ray starts.
            from hybridrl.planner.plan_tables import format_start_summary

            view.message(overview(job, format_start_summary(job.plan) if job.plan else []))
            choices = (
                *job.settings_notices,
                job.placement_notice,
                format_correction_notice(config, job.trainer_class),
                job.plan_notice,
                *list_kl_notices(config),
                *list_precision_notices(config, job.groups),
            )
            here = replace(config, devices=job.executor.cluster.kind)
            unused = (
                *find_ineffective_settings(here),
                *find_ineffective_encodings(config, job.roles, job.placement),
                *find_ineffective_caches(config, job.roles),
            )
            for notice in (*unused, *choices, *job.remarks, *job.resumed.notices):
                if notice:
                    view.message(notice)
            if job.trainer_class.TRAINS:
                view.expect_steps(job.config.trainer.steps)
            loop = RunLoop(job, view)
            interrupts.on_terminate, interrupts.on_interrupt = loop.preempt, loop.interrupt
            summary = loop.run()
        accuracy = resolve_accuracy_name(config.reward)
        view.close(format_final_sentence(summary, job.directory.path, accuracy))
    return summary


@contextmanager
def _report_error_before_closing(view: RunView, interrupts: SignalHandler) -> Iterator[None]:
    """Print the error of a run as soon as it occurs, because closing may take long or hang."""
    code = EXIT_FAILURE
    try:
        yield
        code = 0
    except HybridRLError as error:
        code = error.exit_code
        view.close()
        _print_error(error)
        raise
    finally:
        view.phase("closing")
        interrupts.closing(code)


def _run_dry(config: Config) -> None:
    """Check everything and print the settings, without starting anything."""
    from hybridrl.checks.check_list import Need
    from hybridrl.job.preflight import run_preflight

    unseen = run_preflight(config, Need.FOLDER, Need.MACHINE)
    for sentence in (*unseen, *find_ineffective_settings(config)):
        _print(sentence, stderr=True)
    _print_settings(config)
    _print("All checks passed. To start, leave run.dry=true out.", stderr=True)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.main", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings; --cfg job shows all of a job"
    )
    parser.add_argument("--cfg", choices=["job"], help="print the settings of the job, and end")
    parser.add_argument(
        "--version", action="version", version=f"hybridrl {__version__}", help="print it, and end"
    )
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help="a job for each of several values: algorithm=grpo,rloo run.seed=range(3)",
    )
    return parser


def _reject_commands(words: Sequence[str]) -> None:
    if named := COMMANDS.keys() & {*words[:1]}:
        raise ConfigError(
            f"`{named.pop()}` is a command of the program `hybridrl`, and this one runs jobs. "
            f"Write: hybridrl {shlex.join(sys.argv[1:])}"
        )


def _reject_unknown_flags(flags: Sequence[str]) -> None:
    if flags:
        raise ConfigError(
            f"{' '.join(flags)}: there is no such option; see --help. For settings in a file of "
            "yours write recipe=<file>."
        )


def _print_settings(config: Config) -> None:
    _print(format_effective_yaml(config).removesuffix("\n"))


def _print(text: str, stderr: bool = False) -> None:
    console = Console(stderr=stderr, force_jupyter=False)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_error(error: HybridRLError) -> None:
    if not error.told:
        error.told = True
        print_error(str(error))


def overview(job: Job, plan: Sequence[str]) -> str:
    """Format the run's sizes and the plan's lines on roles, devices and memory, for the start of a
    run."""
    config, cluster = job.config, job.executor.cluster
    prompts, per_prompt = config.data.prompts_per_step, config.rollout.samples_per_prompt
    held_out = len(job.held_out) if job.held_out is not None else 0
    held_out //= 2 if job.trainer_class.DATA == "pairs" else 1
    samples = f"{prompts} prompts x {per_prompt} samples = {prompts * per_prompt} samples"
    of_step = {
        "prompts": samples,
        "examples": f"{prompts} examples",
        "pairs": f"{prompts} pairs",
        "responses": f"{prompts} responses",
    }[job.trainer_class.DATA]
    step = f"step        {of_step}, {config.actor.step_updates} update(s)"
    lines = [
        f"run         {job.directory.path}",
        f"model       {config.model.path or 'tiny, made from the seed'}, {config.model.dtype}",
        f"data        {len(job.training):,} {job.trainer_class.DATA}, {held_out:,} held out",
        *([step] if job.trainer_class.TRAINS else []),
        f"sample      up to {job.longest_prompt} + {job.longest_response} tokens",
        f"devices     {len(cluster.devices)} x {cluster.kind}, placement {job.placement.strategy}",
    ]
    return "\n".join([*lines, *plan])


if __name__ == "__main__":
    main()

"""`python -m hybridrl.main [key=value ...]`: composes the configuration and runs a trainer.

`--cfg job` prints the whole configuration; `--help` and `--multirun` are Hydra's.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from hybridrl.checks.settings import check
from hybridrl.config.load import load_config, to_config, to_yaml
from hybridrl.config.recipe import expand
from hybridrl.config.resumed_settings import with_settings_of_run
from hybridrl.config.schema import Config
from hybridrl.errors import (
    ConfigError,
    DataError,
    HybridRLError,
    MissingPackageError,
    Preempted,
)

WRONG_SETTING, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes."""
PREEMPTED = 75
"""Exit code after SIGTERM where there are checkpoints to go on from: `EX_TEMPFAIL` of sysexits.h,
"try again later". (143 is what a shell says of any program that SIGTERM ended, saved or not.)"""


def main() -> None:
    """The command line."""
    arguments = sys.argv[1:]
    try:
        if any(argument.startswith("-") for argument in arguments):
            sys.argv[1:] = expand(arguments)
            _with_hydra()
        else:
            run(load_config(arguments))
    except Preempted:
        sys.exit(PREEMPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (ConfigError, DataError, MissingPackageError) as error:
        _complain(error)
        sys.exit(WRONG_SETTING)
    except HybridRLError as error:
        _complain(error)
        sys.exit(FAILED)


def run(config: Config) -> dict[str, Any]:
    """Runs one job to its end; returns its summary.

    Raises:
        HybridRLError: a sentence that says what is wrong.
        KeyboardInterrupt: after Ctrl-C, when what there was has been saved.
        Preempted: after SIGTERM, when the run can go on from a checkpoint.
    """
    if config.run.dry:
        check(config)
        Console().print(to_yaml(config), markup=False, highlight=False, end="")
        return {}
    from hybridrl.job import Job
    from hybridrl.observe.console import make_console
    from hybridrl.observe.overview import overview
    from hybridrl.observe.summary import accuracy_name, final_sentence
    from hybridrl.preemption import on_sigterm
    from hybridrl.trainers import load_trainer
    from hybridrl.trainers.loop import Loop

    code = PREEMPTED if config.checkpoint.wanted else INTERRUPTED

    def end_now() -> None:
        view.message("SIGTERM: ended before the first step.")
        raise Preempted if config.checkpoint.wanted else KeyboardInterrupt

    title = f"HybridRL {config.trainer.name}: {config.run.name}"
    steps = config.trainer.steps if load_trainer(config.trainer.name).TRAINS else 0
    with (
        make_console(steps, title, accuracy=accuracy_name(config.reward, short=True)) as view,
        ExitStack() as starting,
    ):
        summary: dict[str, Any] = {}
        grace = config.recover.grace_s
        starting.enter_context(on_sigterm(end_now, grace, code))
        with Job(config, view.phase) as job:
            # It brings in the libraries of the models, which the job imports while Ray starts.
            from hybridrl.planner.table import short

            view.message(overview(job, short(job.plan)))
            for notice in (job.dtype_notice, job.plan.notice, *job.resumed.notices):
                if notice:
                    view.message(notice)
            loop = Loop(job, view)
            summary = loop.summary
            starting.close()
            with on_sigterm(loop.preempt, grace, code):
                try:
                    loop.run()
                finally:
                    view.phase("closing")
        accuracy = accuracy_name(config.reward)
        view.close(final_sentence(summary, job.directory.path, accuracy))
    return summary


@hydra.main(version_base=None, config_path="config", config_name="config")
def _with_hydra(config: Any) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    run(with_settings_of_run(to_config(config), overrides))


def _complain(error: HybridRLError) -> None:
    console = Console(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(str(error), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

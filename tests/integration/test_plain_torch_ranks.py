"""Whole jobs on several ranks, worked out again by plain torch; and in the long tests every program
with everything that changes its numbers."""

import json
import runpy
from pathlib import Path

import plain_torch
import pytest
from plain_cases import CUTTABLE, OPTIMIZERS, OPTIONS, PROGRAMS, exists, make_folders, settings_of

from hybridrl import load_config, main

pytestmark = pytest.mark.more

CLOSE = 1e-5
STALE = ("temperature", "two updates", "entropy", "staleness")
TOGETHER = (
    ("temperature", "two updates", "KL in the loss", "entropy", "correction", "LoRA"),
    ("temperature", "KL in the reward", "tool tokens", "dropped samples"),
    ("two updates", "supervised"),
    ("temperature", "two updates", "KL in the loss", "entropy", "tool tokens", "kept sets"),
    ("temperature", "two updates", "two epochs", "critic epochs"),
    ("temperature", "two updates", "KL limit"),
    STALE,
    (*STALE, "uncorrected", "far negatives"),
    (*STALE, "geometric"),
    (*STALE, "kpop"),
)
"""What can change numbers at the same time, so that few jobs have all of it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)  # for the task
        yield make_folders(root)


@pytest.fixture
def worked_out(run, tmp_path, folders):
    """Runs a job on so many devices; how far each of its numbers is from plain torch's."""

    def finish(program, options, devices, folder="run", overrides=()):
        settings = [*settings_of(program, options, folders), *overrides]
        directory = f"run.directory={tmp_path / folder}"
        if devices == 1:
            found = tmp_path / folder
            main.run(load_config([*settings, "executor=inline", directory]))
        else:
            # On a cluster there may be more devices than this machine has cores.
            found = run(*settings, f"num_devices={devices}", "ray.address=auto", directory)
        name = "holes" if "dropped samples" in options else "digits"
        return plain_torch.recompute(found, runpy.run_path(folders.program)[name])

    return finish


@pytest.mark.ray
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("grpo", STALE),
        ("dppo_kl", (*STALE, "geometric")),
        ("grpo", (*STALE, "kpop")),
        ("gdpo", ["temperature", "two updates"]),
        ("grpo", ["temperature", "two updates", "4 bits", "KL in the loss"]),
        ("sft", ["4 bits"]),
        ("ppo", ["KL in the reward", "tool tokens"]),
        ("ppo", ["temperature", "two updates", "KL in the loss", "entropy", "kept sets"]),
        ("grpo", ["temperature", "two updates", "KL limit"]),
        ("ppo", ["temperature", "two updates", "two epochs", "critic epochs"]),
        *((program, ["temperature"]) for program in ("simpo", "orpo", "online_cpo", "kto")),
    ],
)
def test_a_job_on_ranks_is_what_plain_torch_makes_of_it(worked_out, program, options):
    """With generation on a device of its own, two ranks learn."""
    found = worked_out(program, options, 3 if "staleness" in options else 2)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)


@pytest.mark.ray
@pytest.mark.parametrize("cut", ["dp=2", "tp=2", pytest.param("dp=2 tp=2", marks=pytest.mark.long)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_parts_step_as_those_of_plain_torch(worked_out, folders, optimizer, cut):
    if "int8" in optimizer and "tp=" in cut:
        pytest.skip("blocks of moments end where a matrix is cut along its rows")
    sizes = [f"actor.parallel.{size}" for size in cut.split()]
    devices = 4 if len(sizes) == 2 else 2
    model = Path(folders.model).with_name(CUTTABLE)
    given = [*OPTIMIZERS[optimizer], *sizes, f"model.path={model}"]
    found = worked_out("sft", ["temperature", "two updates"], devices, overrides=given)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)


def cases_of(program):
    """Devices and options: each option alone on one, several at the same time on two and four."""
    cases = [(1, (option,)) for option in OPTIONS if option != "staleness"]
    for devices, options in [*cases, *((n, options) for n in (2, 4) for options in TOGETHER)]:
        left = tuple(option for option in options if exists(program, option))
        if left and ("staleness" in left or "staleness" not in options):
            yield devices, left


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_with_everything_on_one_two_and_four_ranks(worked_out, program, tmp_path):
    found = {}
    for number, (devices, options) in enumerate(cases_of(program)):
        name = f"{devices}: {', '.join(options)}"
        found[name] = worked_out(program, options, devices, f"run-{number}")
    (tmp_path / "differences.json").write_text(json.dumps(found, indent=1))
    off = {
        f"{case}: {name}": far
        for case, numbers in found.items()
        for name, far in numbers.items()
        if not far <= CLOSE
    }
    assert not off

"""What all tests share: one Hypothesis profile, one thread, process groups that end, and unit tests
without Ray or vLLM."""

import os
import signal
import sys
from pathlib import Path

# Torch reads it when it is imported; the processes that tests start inherit it. More threads than
# cores make small tensor operations ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

# A shell that runs the tests in the background has them ignore interrupts, and with them the
# programs that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples on every run: a failure is a change in the code, never luck.
settings.register_profile(
    "hybridrl", max_examples=40, deadline=None, derandomize=True, database=None
)
settings.load_profile("hybridrl")

UNIT = Path(__file__).parent / "unit"
HEAVY = {"ray", "vllm"}


@pytest.fixture(scope="session")
def all_are_unit_tests(request):
    return all(item.path.is_relative_to(UNIT) for item in request.session.items)


@pytest.fixture(autouse=True, scope="module")
def unit_tests_need_no_ray_and_no_vllm(request, all_are_unit_tests):
    """Fails a module of `tests/unit` that brings Ray or vLLM into the process."""
    if not request.path.is_relative_to(UNIT):
        yield
        return
    before = set() if all_are_unit_tests else HEAVY & sys.modules.keys()
    yield
    brought = HEAVY & sys.modules.keys() - before
    assert not brought, f"{request.path.name}, or a unit test before it, imported {brought}."


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests():
    """Forgets the secrets that a test has had settings with: they may be words of the next one."""
    from hybridrl.system import redaction

    yield
    redaction._secrets.clear()
    redaction._pattern = None


@pytest.fixture(scope="module")
def process_group():
    """Of a module whose tests join process groups in this process: they end with it."""
    environment = dict(os.environ)
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def mesh(process_group):
    """Of this process alone, on the CPU."""
    import torch

    from hybridrl.controller import WorkerContext
    from hybridrl.layout.rank_mesh import RankMesh
    from hybridrl.parallel.process_group import ParallelMesh, join_group_world

    join_group_world(WorkerContext("actor", 0, 1))
    return ParallelMesh(RankMesh({"dp": 1}), torch.device("cpu"))

"""After a loss a job goes on from the copy of its checkpoint in the memory of nodes, if that is
whole; the files, of which nothing is left here, are not read then."""

from __future__ import annotations

import netlab
import pytest
from settings import SHORT
from victims import Victim

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
EVERY = 16
JOB = [
    *(*SHORT, "rollout=transformers", "devices=cpu", "num_devices=2", "recover.wait_s=60"),
    *(f"trainer.steps={2 * EVERY}", f"checkpoint.every={EVERY}", "observe.samples_every=0"),
]
COPIES = "checkpoint.memory_copies=1"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    victim = Victim(tmp_path_factory.mktemp("undisturbed"), *JOB)
    assert victim.finish() == 0, victim.output
    return victim


@pytest.fixture
def start(tmp_path):
    """Starts a job, and waits until it has a checkpoint."""
    started = []

    def begin(*settings, **options):
        victim = Victim(tmp_path, *JOB, *settings, **options)
        started.append(victim)
        assert victim.wait_for_line(f"step {EVERY}: checkpoint saved"), victim.output
        return victim

    yield begin
    for victim in started:
        for process in victim.processes():
            process.kill()


def destroy_files(victim):
    """Of the newest checkpoint, as far as they have tensors."""
    files = list((victim.run / "checkpoints").rglob("actor/*.safetensors"))
    assert files
    for file in files:
        file.write_bytes(b"")


def assert_went_on(victim, undisturbed, from_memory):
    assert victim.finish() == 0, victim.output
    (row,) = victim.recoveries()
    assert (row["from_step"], row["from_memory"]) == (EVERY, from_memory), victim.output
    assert (f"step {EVERY}, read from memory, with 2 devices" in victim.output) == from_memory
    assert victim.rows() == undisturbed.rows()
    mine, other = victim.model(), undisturbed.model()
    assert all(mine[name].equal(tensor) for name, tensor in other.items())


@pytest.mark.long
def test_a_killed_worker_is_replaced_from_memory(start, undisturbed):
    victim = start(COPIES)
    assert "there is 1 node" in victim.output
    destroy_files(victim)
    assert victim.kill("host")
    assert_went_on(victim, undisturbed, from_memory=True)
    assert not victim.left_after(30)


@pytest.mark.long
def test_without_a_whole_copy_the_files_are_read(start, undisturbed):
    victim = start(COPIES)
    assert victim.kill("keeper") and victim.kill("host")
    assert_went_on(victim, undisturbed, from_memory=False)
    assert f"No whole copy of step {EVERY} is in memory; its files are read." in victim.output


@pytest.mark.long
def test_a_lost_node_is_replaced_from_the_memory_of_another(start, undisturbed):
    with netlab.ray_nodes(nodes=2, cpus=1) as nodes:
        cluster = f"ray.address={nodes[0].cluster}"
        victim = start(COPIES, cluster, environment=netlab.RAY_ENVIRONMENT)
        assert "each is on 2 nodes, of which 1 may be lost" in victim.output
        destroy_files(victim)
        nodes[1].fail()
        netlab._start_node(nodes[1], 1, False, {})
        assert_went_on(victim, undisturbed, from_memory=True)

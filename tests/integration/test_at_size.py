"""Large jobs, rehearsed (see `at_size`): what the plan says of a rank's memory is what it takes,
and nothing makes the host wait for the device in a layer."""

import pytest
from at_size import GIB, JOBS, OTHERS, in_a_process

pytestmark = pytest.mark.more

TOLERANCE = 0.1
ROUNDS = 0.2 * GIB
"""Messages of a sync take less than their room, as the number of rounds has it."""
WAITS = 18
"""More often the host may not wait for the device in an update of two micro-batches: for fifteen
metrics and the norm of the gradients."""


def check(name):
    found, job = in_a_process(name), (JOBS | OTHERS)[name]
    phases = found["phases"]
    for phase, figures in phases.items():
        seen = pytest.approx(figures["seen"], rel=TOLERANCE, abs=ROUNDS)
        assert figures["planned"] == seen, (name, phase)
    assert phases["load"]["waits"] == 0
    synced = found["synced"]
    assert synced["received"] <= synced["most"] == pytest.approx(synced["planned"], rel=0.02)
    share = 12 * found["parameters"] * job.size("tp") / job.devices
    shards = job.size("shards", job.devices // job.size("tp"))
    assert found["bytes_written"] == pytest.approx(share, rel=TOLERANCE), "weights and moments"
    assert found["bytes_read"] <= 1.05 * 2 * found["parameters"] / shards, (
        "a rank reads what it holds"
    )
    return found


@pytest.mark.slow
def test_a_small_job_takes_what_its_plan_says():
    small, cut, *_ = map(check, ("small-8", "small-16-tp2", "small-8-bfloat16", "small-8-apart"))
    layers = OTHERS["small-8"].model["num_hidden_layers"]
    train = small["phases"]["train"]
    # Two micro-batches; in each, gradients are summed once for every layer, and what is around.
    assert 2 * layers < train["collectives"]["reduce_scatter of 8"][0] <= 2 * (layers + 3)
    # States are gathered before attention and MLP of each layer and summed and split after them,
    # forward, in what is repeated (but for its last sum) and backward; and so at the two ends.
    states = cut["phases"]["train"]["collectives"]
    assert states["allgather of 2"][0] == 2 * (6 * layers + 2)
    assert states["reduce_scatter of 2"][0] == 2 * (5 * layers + 1)
    assert train["waits"] <= WAITS


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_a_large_job_takes_what_its_plan_says(name):
    check(name)

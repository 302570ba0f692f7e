"""The main job with a generator of its own, by each way of bringing weights there."""

import json

import pytest
from netlab import ray_nodes
from settings import LEARNS, SHORT
from test_separation import steps_of
from test_two_hosts import Driver

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
JOB = [
    *(*SHORT, *LEARNS, "placement=separation", "model.dtype=bfloat16", "trainer.steps=4"),
    *("actor.optimizer.learning_rate=1e-5", "eval.every=100"),
]
COLLECTIVE, STORE = "placement.transport=collective", "placement.transport=store"
FULL, DELTA, INT8, INT4_DELTA = range(4)


@pytest.mark.parametrize("transport", [COLLECTIVE, STORE])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_generator_has_the_trainers_weights_and_what_changed_travels(engine, transport, run):
    settings = [f"rollout={engine}", transport, "rollout.weight_sync=delta"]
    steps = steps_of(run(*JOB, *settings, "rollout.verify_weights=true"))
    later = steps[1:]  # the first samples are of weights that an evaluation has brought
    assert [row["sync/codec"] for row in later] == [DELTA] * 3
    for row in later:
        assert 0 < row["sync/changed_share"] < 0.5 and row["sync/repeated"] == 0
        assert row["sync/received_bytes"] < row["sync/peak_bytes"] / 2
        assert row["mismatch/k3"] < 1e-3  # other weights would say something else


@pytest.mark.parametrize(("method", "codec"), [("int8", INT8), ("int4_delta", INT4_DELTA)])
@pytest.mark.parametrize("transport", [COLLECTIVE, STORE])
def test_fewer_bits_say_how_far_the_generator_is_off(method, codec, transport, run):
    settings = ["rollout=transformers", transport, f"rollout.weight_sync={method}"]
    steps = steps_of(run(*JOB, *settings, "rollout.weight_sync_refresh=4"))
    assert {row["sync/codec"] for row in steps[1:]} <= {FULL, codec}
    assert codec in {row["sync/codec"] for row in steps[1:]}
    assert all(row["mismatch/k3"] < 0.05 for row in steps)


def test_within_a_node_weights_are_copied(run):
    steps = steps_of(run(*JOB, "rollout=transformers", COLLECTIVE))
    assert {row["sync/codec"] for row in steps if "sync/codec" in row} == {FULL}


@pytest.mark.parametrize("transport", [COLLECTIVE, STORE])
def test_between_nodes_both_ways_are_measured(tmp_path, transport):
    with ray_nodes(nodes=2, cpus=1) as nodes:
        driver = Driver(nodes, tmp_path, *JOB, "rollout=transformers", transport)
        code, output = driver.finish()
    assert code == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["sync/codec"] for row in rows if "sync/codec" in row} == {FULL, DELTA}

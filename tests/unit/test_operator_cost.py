"""Costs of operators: learned from tables of devices that are made up, so that nothing is timed."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from settings import configured

from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine import device_catalog as devices
from hybridrl.planner.machine import measurements
from hybridrl.planner.machine.cluster_rates import resolve_rates
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.machine.measurements import CLUSTER, OPERATORS
from hybridrl.planner.step.operator_work import (
    DECODE,
    FORWARD,
    GATHER,
    HEAD,
    OPTIMIZER,
    TRAIN,
    OperatorWork,
)
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from hybridrl.systems.operator_costs import calibration
from hybridrl.systems.operator_costs.cost_model import (
    CostSample,
    CostTable,
    DeviceCostModel,
    DeviceProfile,
    OperatorCostModel,
    choose_representative,
    roofline_seconds,
)
from hybridrl.systems.operator_costs.cost_source import (
    describe_table,
    load_other_tables,
    offer_costs,
)

SLOW = DeviceProfile(1e10, 2e9, 5e9, 1e9, 2e-6)
FAST = DeviceProfile(1e12, 1e11, 1e11, 1e10, 1e-6)
BETWEEN = DeviceProfile(1e11, 1e10, 2e10, 3e9, 1.5e-6)


def works(number, seed):
    """Of all kinds, in sizes from a few tokens to a few thousand."""
    draws = random.Random(seed)
    found = []
    for _ in range(number):
        hidden = draws.choice([64, 128, 256, 512, 1024])
        op = draws.choice([FORWARD, TRAIN, DECODE, HEAD, OPTIMIZER, GATHER])
        parameters = hidden**2 * draws.uniform(6, 16)
        tokens = draws.choice([8, 64, 256, 2048])
        if op in (OPTIMIZER, GATHER):
            found.append(OperatorWork(op, parameters))
        else:
            length = draws.choice([32, 128, 512])
            found.append(OperatorWork(op, tokens, length, hidden, parameters, hidden, hidden))
    return found


def table(device, number=150, seed=0, quirk=1.0):
    """As a device has it on which small products are slow, and one kind of work takes longer."""
    some = works(number, seed)
    line = roofline_seconds(some, device)
    factor = [
        1.2
        * (1 + 0.8 / (1 + work.tokens * work.hidden / 2e4))
        * (quirk if work.op == HEAD else 1.0)
        for work in some
    ]
    return CostTable(
        device, [CostSample(w, s * f) for w, s, f in zip(some, line, factor, strict=True)]
    )


def error(costs, of):
    said = costs.seconds([sample.work for sample in of.samples], of.device)
    return float(np.abs(said / [sample.seconds for sample in of.samples] - 1).mean())


@pytest.fixture(scope="module")
def costs():
    return OperatorCostModel([table(SLOW, seed=1), table(FAST, seed=2)])


def test_what_was_not_measured_is_predicted(costs):
    assert error(costs, table(SLOW, seed=7)) < 0.02
    assert error(costs, table(FAST, seed=8)) < 0.02


def test_a_device_of_which_only_the_rates_are_known(costs):
    assert error(costs, table(BETWEEN, seed=9)) < 0.03


def test_50_samples_tell_what_is_peculiar_to_a_device(costs):
    known = [table(SLOW, seed=1), table(FAST, seed=2)]
    seen, unseen = table(BETWEEN, seed=3, quirk=2.0), table(BETWEEN, seed=4, quirk=2.0)
    few = choose_representative(seen.works, BETWEEN, 50)
    more = OperatorCostModel([*known, CostTable(BETWEEN, [seen.samples[n] for n in few])])
    assert error(more, unseen) < min(0.02, error(costs, unseen) / 2)
    assert error(more, table(SLOW, seed=7)) < 0.02  # the others are what they were


def test_those_are_chosen_that_stand_for_the_rest():
    some = works(300, 5)
    few = choose_representative(some, SLOW, 40)
    assert len(few) == len(set(few)) <= 40
    assert {some[n].op for n in few} == {work.op for work in some}
    assert choose_representative(some[:3], SLOW, 40) == [0, 1, 2]
    assert len(choose_representative([some[0]] * 5, SLOW, 4)) == 1


def test_tables_are_plain_data(costs):
    made = table(SLOW, 20)
    read = CostTable.of_data(json.loads(json.dumps(made.to_data())))
    assert read == CostTable(made.device, list(made.samples))


def test_more_work_takes_longer_on_the_roofline():
    work = OperatorWork(TRAIN, 256, 64, 128, 2e5, 128, 128)
    least = roofline_seconds([work], SLOW)[0]
    for more in (
        replace(work, tokens=512.0),
        replace(work, length=128.0),
        replace(work, parameters=4e5),
    ):
        assert roofline_seconds([more], SLOW)[0] > least
    assert roofline_seconds([work], FAST)[0] < least


def test_plans_take_what_was_measured_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 128}
    make_tiny_model(
        tmp_path / "model", build_character_tokenizer(PRINTABLE_CHARACTERS), seed=0, **shape
    )
    config = configured([f"model.path={tmp_path}/model", "model.dtype=float32", "num_devices=2"])
    here = devices.add_device_memory(ClusterSpec.of_one_node("cpu", 2))
    known = DeviceSpec(1e10, {"float32": 1e10, "bfloat16": 1e10}, 5e9, 2e-6, measured=True)
    host = NodeSpec(LinkSpec(1e9), LinkSpec(1e9))
    probed = replace(here, models=dict.fromkeys(here.model_names, known), hosts={"localhost": host})
    kept = measurements.begin_measurement(CLUSTER, measurements.describe_devices(here))
    measurements.keep_measurement(replace(kept, data=json.loads(probed.to_json())))
    (tmp_path / "hybridrl" / "measurements" / "other.json").write_text("{")  # cut short
    assert load_other_tables("float32") == []
    measured = table(SLOW, seed=1)
    kept = measurements.begin_measurement(OPERATORS, describe_table(here, "float32"))
    measurements.keep_measurement(replace(kept, data=measured.to_data()))
    offer_costs()
    rates = resolve_rates(config, here)[0]
    assert "pieces of work measured just now" in rates.source
    work, seconds = measured.samples[0]
    assert rates.costs.seconds(work) == pytest.approx(seconds, rel=0.2)
    elsewhere = devices.parse_cluster("8xH100")
    assert resolve_rates(config, elsewhere)[0].costs is None


@pytest.mark.more
def test_a_plan_is_made_of_measured_work(tmp_path):
    make_tiny_model(
        tmp_path,
        build_character_tokenizer(PRINTABLE_CHARACTERS),
        seed=0,
        hidden_size=64,
        layers=2,
        heads=2,
        context=128,
    )
    config = configured([f"model.path={tmp_path}", "algorithm=ppo", "num_devices=1"])
    here = devices.add_device_memory(ClusterSpec.of_one_node("cpu", 1))
    rates = DeviceRates(1e10, 1e10, 1e-4, 3e-4, 5e9, 1e9, 1e9, 1.0, 2e-6, "made up")

    def seconds(device):
        costs = DeviceCostModel(table(device, seed=1))
        return build_job_plan(config, here, rates=[replace(rates, costs=costs)]).times.phases

    slow, fast = seconds(SLOW), seconds(FAST)
    for phase in (("actor", "train"), ("actor", "generate"), ("critic", "score")):
        assert slow[phase] > fast[phase]


@pytest.mark.more
def test_every_kind_of_work_is_measured(monkeypatch):
    monkeypatch.setattr(calibration, "_MIN_SECONDS", 1e-4)
    monkeypatch.setattr(calibration, "TURNS", 1)
    here = devices.add_device_memory(ClusterSpec.of_one_node("cpu", 1))
    known = DeviceSpec(1e10, {"float32": 1e10}, 5e9)
    here = replace(here, models=dict.fromkeys(here.model_names, known))
    here = replace(here, hosts={"localhost": NodeSpec(LinkSpec(1e9), LinkSpec(1e9))})
    found = calibration.measure_operators(here, "float32", ["qwen3"], [128])
    assert {sample.work.op for sample in found.samples} == (
        {FORWARD, TRAIN, DECODE, HEAD, "head train", OPTIMIZER}
    )
    assert all(sample.seconds > 0 for sample in found.samples)

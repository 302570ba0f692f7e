"""Bits of layers for devices of different speeds, and the plan that says so."""

import itertools
import json
import random

import pytest
from settings import configured

from hybridrl.errors import ConfigError
from hybridrl.systems.low_bits.bit_allocation import DeviceWorkload, LayerCost, allocate_bits
from hybridrl.systems.low_bits.precision_plan import (
    PrecisionPlan,
    RankPrecision,
    list_precision_notices,
)
from hybridrl.systems.unequal_devices import UnequalDevice, load_unequal_devices


def even_work(layers=8, whole=1.0, low=0.2, ends=0.5, fixed=0.0):
    costs = {16: LayerCost(whole, 4), 8: LayerCost(low, 1)}
    return DeviceWorkload([costs] * layers, ends, fixed)


FAST, WEAK = UnequalDevice("fast"), UnequalDevice("weak", 0.5)
RISING = {n: {8: float(n + 1), 4: 10.0 * (n + 1)} for n in range(8)}


def test_the_least_harmful_layers_are_lowered_and_no_more_than_needed():
    found = allocate_bits(even_work(), [FAST, WEAK], RISING)
    # 2 (0.5 + 8 - 0.8 n) <= 8.5 from n = 6 on
    assert found.bits == [[16] * 8, [8] * 6 + [16] * 2]
    assert found.target == 8.5 and max(found.seconds) <= found.target
    assert found.seconds[1] == pytest.approx(2 * (0.5 + 2 + 6 * 0.2))


def test_equal_devices_and_equal_work_leave_all_whole():
    assert allocate_bits(even_work(), [FAST, FAST], RISING).bits == [[16] * 8] * 2
    assert allocate_bits(even_work(), [WEAK], RISING).bits == [[16] * 8]
    none_gains = even_work(low=1.5)
    assert allocate_bits(none_gains, [FAST, WEAK], RISING).bits == [[16] * 8] * 2


def test_a_device_that_cannot_keep_pace_sets_it():
    """Then all others may be whole, and a third one need not be as fast as the first."""
    tenth, half = UnequalDevice("tenth", 0.1), UnequalDevice("half", 0.5)
    found = allocate_bits(even_work(), [FAST, half, tenth], RISING)
    assert found.bits == [[16] * 8, [16] * 8, [8] * 8]
    assert max(found.seconds) == found.seconds[2] > found.target


def test_messages_take_as_long_whatever_the_bits():
    alone = allocate_bits(even_work(), [FAST, WEAK], RISING)
    beside = allocate_bits(even_work(fixed=3.0), [FAST, WEAK], RISING)
    assert beside.bits == alone.bits
    assert beside.seconds == pytest.approx([s + 3 for s in alone.seconds])


def test_memory_lowers_layers_that_time_would_not():
    small = UnequalDevice("small", 1.0, memory=20)
    found = allocate_bits(even_work(), [FAST, small], RISING)
    assert found.bits == [[16] * 8, [8] * 4 + [16] * 4]
    costs = {16: LayerCost(1, 4), 8: LayerCost(0.2, 2), 4: LayerCost(1.5, 1)}
    work = DeviceWorkload([costs] * 4)
    found = allocate_bits(work, [UnequalDevice("tiny", 1, 6)], RISING)
    assert sorted(found.bits[0]) == [4, 4, 8, 8] and work.bytes(found.bits[0]) == 6
    with pytest.raises(ConfigError, match=r"`tiny` has .*memory_gib"):
        allocate_bits(work, [UnequalDevice("tiny", 1, 3)], RISING)


def test_no_single_layer_could_be_raised_further():
    """At random costs: the choice is feasible, and every single rise would be too slow."""
    dice = random.Random(0)
    for _ in range(50):
        layers = [
            {16: LayerCost(w := dice.uniform(1, 2)), 8: LayerCost(w * dice.uniform(0.2, 1.1))}
            for _ in range(6)
        ]
        work = DeviceWorkload(layers, dice.uniform(0, 1))
        harms = {n: {8: dice.random()} for n in range(6)}
        found = allocate_bits(work, [FAST, UnequalDevice("weak", dice.uniform(0.3, 1))], harms)
        bits, share = found.bits[1], 1.0
        every = [list(b) for b in itertools.product((8, 16), repeat=6)]
        share = work.seconds(bits, 1.0) / found.seconds[1]
        least = min(work.seconds(b, share) for b in every)
        allowed = max(found.target, least)
        assert work.seconds(bits, share) <= allowed * (1 + 1e-9)
        for n in range(6):
            if bits[n] == 8:
                raised = [16 if m == n else b for m, b in enumerate(bits)]
                assert work.seconds(raised, share) > allowed * (1 - 1e-9)


def test_a_plan_is_data(tmp_path):
    plan = PrecisionPlan(
        "scoring",
        3,
        "bfloat16",
        [RankPrecision({}, "fast"), RankPrecision({1: 8, 2: 4, 0: 16}, "weak", 0.5)],
    )
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    read = PrecisionPlan.load(str(file), "models.reference.precision")
    assert read == plan and read.low_layers == [1, 2]
    assert [read.of_rank(r) for r in (0, 1)] == [{}, {1: 8, 2: 4}]
    alone = PrecisionPlan("training", 3, "float32", [RankPrecision({2: 8})])
    assert alone.of_rank(7) == {2: 8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "placement"}, "kind is 'placement'"),
        ({"use": "dreaming"}, "use is 'dreaming'"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"layers": 0}, "layers is 0"),
        ({"ranks": []}, "at least one"),
        ({"ranks": [{}]}, "bits"),
        ({"ranks": [{"bits": {"3": 8}}]}, "layer 3 of a model of 3"),
        ({"ranks": [{"bits": {"one": 8}}]}, "one"),
        ({"ranks": [{"bits": {"1": 5}}]}, "5 bits"),
        ({"ranks": [{"bits": {"1": None}}]}, "None bits"),
        ({"use": "training", "ranks": [{"bits": {"1": 4}}]}, "4 bits"),
        ({"ranks": [{"bits": {}, "share": -1}]}, "share is -1"),
        ({"ranks": [{"bits": {}, "share": float("nan")}]}, "share is nan"),
        (None, "no plan"),
    ],
)
def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path, change, said):
    text = PrecisionPlan("scoring", 3, "bfloat16", [RankPrecision({1: 8})]).to_json()
    text = text[:-20] if change is None else json.dumps(json.loads(text) | change)
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as raised:
        PrecisionPlan.load(str(file), "actor.precision")
    assert str(raised.value).startswith(f"actor.precision={file}: this is no plan of precision")
    with pytest.raises(ConfigError, match="no such file"):
        PrecisionPlan.load(str(tmp_path / "none.json"), "actor.precision")


def test_what_people_wrote_beside_a_plan_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    setting = ["models.reference.precision=~/plan.json", "algorithm.kl_coefficient=0.1"]
    for found, said in (([0.5, 0.25], "0.5 nats"), ({"a": None}, "fewer bits"), (["x"], "fewer")):
        plan = PrecisionPlan("scoring", 2, "float32", [RankPrecision({0: 8})], {"token_kl": found})
        (tmp_path / "plan.json").write_text(plan.to_json())
        (notice,) = list_precision_notices(configured(setting), ["reference"])
        assert said in notice


@pytest.mark.parametrize("share", ["Infinity", "NaN", "0", "true", '"1"'])
def test_devices_without_a_speed_are_refused(tmp_path, share):
    file = tmp_path / "devices.json"
    file.write_text(f'[{{"name": "a", "share": {share}}}]')
    with pytest.raises(ConfigError, match="device 0 has share="):
        load_unequal_devices(str(file), ("name", "share"))

"""Plans of generation over unequal devices: the best there is, or a sentence."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from hybridrl.errors import ConfigError
from hybridrl.system.cluster_spec import LinkSpec
from hybridrl.systems.unequal_generation.generation_plan import (
    GenerationPlan,
    GenerationStage,
    format_generation_plan,
    load_generation_plan,
    make_equal_plan,
)
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationDevice,
    GenerationProblem,
    PhaseCosts,
    compute_stage_memory,
    interpolate_seconds,
    predict_generation_time,
    sum_indicators,
)
from hybridrl.systems.unequal_generation.plan_search import search_generation_plan

MICRO_BATCHES, PIECES = (1, 2), (1, 2)


def link(latency, seconds_a_byte):
    """A link as it is thought of here: what a message takes, and each byte of it."""
    return LinkSpec(1 / max(seconds_a_byte, 1e-18), latency)


def random_problem(seed):
    draw = random.Random(seed)
    devices, layers = draw.choice([(1, 4), (2, 3), (2, 4), (2, 4), (3, 3)])
    bits = draw.choice([(8, 16), (4, 8, 16)]) if layers < 4 else (8, 16)

    def curve(slope):
        points = [(1, slope * draw.uniform(0.5, 2)), (8, slope * draw.uniform(3, 9))]
        return tuple(points)

    def costs(speed):
        layer = {one: curve(speed * one / 16 * draw.uniform(0.8, 1.3)) for one in bits}
        return PhaseCosts(layer, curve(speed / 2), curve(speed / 10))

    made = []
    for number in range(devices):
        speed = draw.uniform(0.3, 3)
        memory = draw.uniform(0.4, 2) * layers * 16 / devices + 3
        made.append(GenerationDevice(f"d{number}", memory, costs(5 * speed), costs(speed)))
    links = tuple(
        tuple(link(draw.uniform(0, 0.3), draw.uniform(0, 0.02)) for _ in made) for _ in made
    )
    indicators = tuple(
        {one: draw.uniform(0, 1) * (16 - one) for one in bits} for _ in range(layers)
    )
    return GenerationProblem(
        tuple(made),
        links,
        indicators,
        draw.uniform(0, 8 * layers),
        samples=draw.choice([1, 3, 4, 7]),
        prompt_tokens=draw.randint(1, 5),
        response_tokens=draw.randint(1, 6),
        layer_bytes={one: float(one) for one in bits},
        cache_bytes=draw.uniform(0, 0.05),
        embedding_bytes=1.0,
        head_bytes=1.0,
        state_bytes=1.0,
    )


def every_plan(problem):
    bits = sorted(problem.layer_bytes)
    for size in range(1, min(len(problem.devices), problem.layers) + 1):
        for order in itertools.permutations(range(len(problem.devices)), size):
            for inner in itertools.combinations(range(1, problem.layers), size - 1):
                bounds = [0, *inner, problem.layers]
                for chosen in itertools.product(bits, repeat=problem.layers):
                    stages = tuple(
                        GenerationStage(device, chosen[start:stop])
                        for device, start, stop in zip(order, bounds, bounds[1:], strict=False)
                    )
                    for count, pieces in itertools.product(MICRO_BATCHES, PIECES):
                        if count * pieces <= problem.samples or count == pieces == 1:
                            yield GenerationPlan(stages, count, pieces)


def is_allowed(problem, plan):
    memory = zip(compute_stage_memory(problem, plan), plan.stages, strict=True)
    fits = all(size <= problem.devices[stage.device].memory for size, stage in memory)
    return fits and sum_indicators(problem, plan) <= problem.max_kl


@pytest.mark.more
def test_programs_find_what_trying_every_plan_finds():
    possible = 0
    for seed in range(100):
        problem = random_problem(seed)
        allowed = [plan for plan in every_plan(problem) if is_allowed(problem, plan)]
        try:
            found = search_generation_plan(
                problem, micro_batches=MICRO_BATCHES, pieces=PIECES, gap=0
            )
        except ConfigError:
            assert not allowed, seed
            continue
        possible += 1
        best = min(predict_generation_time(problem, plan).total for plan in allowed)
        assert predict_generation_time(problem, found).total == pytest.approx(best, rel=1e-6), seed
        assert is_allowed(problem, found), seed
    assert 30 < possible < 100


def simulated(stage_seconds, micro_batches, tokens):
    """When the last token is there, event by event."""
    free, back = [0.0] * len(stage_seconds), [0.0] * micro_batches
    for _ in range(tokens - 1):
        for group in range(micro_batches):
            now = back[group]
            for stage, took in enumerate(stage_seconds):
                now = free[stage] = max(now, free[stage]) + took
            back[group] = now
    return max(back)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_seconds_of_decode_are_those_of_a_pipeline_event_by_event(micro_batches):
    from hybridrl.systems.unequal_generation.generation_problem import predict_decode_seconds

    for stages in ([3.0], [1.0, 4.0, 2.0], [5.0, 1.0], [2.0, 2.0, 2.0]):
        for tokens in (1, 2, 9):
            expected = simulated(stages, micro_batches, tokens)
            assert predict_decode_seconds(stages, micro_batches, tokens) == pytest.approx(expected)


def test_what_lacks_is_said():
    problem = random_problem(1)
    small = tuple(replace(device, memory=1.0) for device in problem.devices)
    with pytest.raises(ConfigError, match="does not fit"):
        search_generation_plan(replace(problem, devices=small))
    roomy = tuple(replace(device, memory=1e6) for device in problem.devices)
    nothing = tuple(dict.fromkeys(one, 1.0) for one in problem.indicators)
    with pytest.raises(ConfigError, match=r"rollout.max_kl=0.* Set a higher one"):
        search_generation_plan(replace(problem, devices=roomy, indicators=nothing, max_kl=0.0))
    tight = replace(
        problem,
        devices=problem.devices[:1],
        links=((LinkSpec(math.inf),),),
        max_kl=0.0,
        indicators=tuple({8: 1.0, 16: 0.0} for _ in range(problem.layers)),
        layer_bytes={8: 8.0, 16: 16.0},
    )
    device = replace(
        problem.devices[0],
        memory=10.0 * problem.layers,
        prefill=_only(problem.devices[0].prefill),
        decode=_only(problem.devices[0].decode),
    )
    with pytest.raises(ConfigError, match=r"No plan keeps both rollout\.max_kl=0 and the memory"):
        search_generation_plan(replace(tight, devices=(device,), cache_bytes=0.0))


def _only(costs):
    return replace(costs, layer={bits: costs.layer[max(costs.layer)] for bits in (8, 16)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"indicators": ({8: -1.0, 16: 0.0},)}, "indicators of layer 0"),
        ({"indicators": ({8: float("nan"), 16: 0.0},)}, "indicators of layer 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(change, sentence):
    problem = next(p for p in map(random_problem, range(50)) if set(p.layer_bytes) == {8, 16})
    with pytest.raises(ConfigError, match=sentence):
        search_generation_plan(replace(problem, **change))


def test_costs_between_and_beyond_what_was_measured():
    curve = ((2, 1.0), (4, 2.0), (8, 3.0))
    assert [interpolate_seconds(curve, rows) for rows in (1, 2, 3, 6, 16)] == [
        0.5,
        1.0,
        1.5,
        2.5,
        5.0,
    ]
    assert interpolate_seconds(((4, 2.0),), 100) == 2.0
    assert interpolate_seconds(((4, 1.0), (8, 9.0)), 1) == 0.0


def test_plans_are_files(tmp_path):
    plan = GenerationPlan(
        (GenerationStage(1, (16, 8), "a"), GenerationStage(0, (4,))), 3, 2, 0.004, {"x": 1.0}
    )
    (tmp_path / "plan.json").write_text(format_generation_plan(plan))
    assert load_generation_plan(tmp_path / "plan.json") == plan
    assert plan.bits == {0: 16, 1: 8, 2: 4}
    assert [len(stage.bits) for stage in make_equal_plan(7, 3).stages] == [2, 2, 3]
    some = GenerationPlan((GenerationStage(5, (16,)), GenerationStage(2, (4,))), 1).renumbered()
    assert [stage.device for stage in some.stages] == [1, 0]
    with pytest.raises(ConfigError, match="at most 2"):
        make_equal_plan(2, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stages": []}, "no stages"),
        ({"stages": [{"device": 1, "bits": [16]}]}, r"are on the devices \[1\]"),
        ({"stages": [{"device": 0, "bits": [16, 5]}]}, r"\[5\] bits"),
        ({"stages": [{"device": 0, "bits": []}]}, "no layers"),
        ({"stages": [{"device": "x", "bits": [8]}]}, "'x'"),
        ({"stages": 3}, "has to be a list"),
        ({"decode_micro_batches": 0}, "`decode_micro_batches` is 0"),
        ({"kl": float("nan")}, "kl is nan"),
        ({"kl": -1}, "kl is -1"),
        ({"predicted": [1]}, "has to be an object"),
        ({"other": 1}, "`other` is not known"),
    ],
)
def test_wrong_plans_are_refused(tmp_path, change, sentence):
    good = json.loads(format_generation_plan(make_equal_plan(4, 2)))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(ConfigError, match=sentence):
        load_generation_plan(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"stages": [2]}'])
def test_damaged_files_are_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="hybridrl plan generation"):
        load_generation_plan(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="could not be read"):
        load_generation_plan(tmp_path / "none.json")

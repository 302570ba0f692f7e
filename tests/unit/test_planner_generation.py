"""The planned time of generation follows from what vLLM's cache holds; and vLLM's share of a GPU
from what else is on it."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
from published_shapes import write_qwen3
from settings import configured

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.changed import apply_changes
from hybridrl.errors import ConfigError
from hybridrl.planner.fitting_settings import (
    check_plan_fits,
    choose_automatic_settings,
    find_fitting_settings,
    list_candidates,
    search_variants,
)
from hybridrl.planner.job_plan import build_job_plan, job_plan_to_json
from hybridrl.planner.machine.device_catalog import GIB, parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.search.placement_search import search_placements
from hybridrl.planner.search.placement_space import PlacementShape
from hybridrl.planner.search.planned_costs import PlannedSearchCosts
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.planner.what_if.replanning import planned_times

CLUSTER = parse_cluster("8xH100")
RATES = DeviceRates.known(CLUSTER, "bfloat16")
LENGTHS = SampleLengths.alike(1024, 4096)
JOB = [
    *("devices=cuda", "model.dtype=bfloat16", "data.max_prompt_tokens=1024"),
    *("rollout.max_tokens=8192", "data.prompts_per_step=128", "rollout.samples_per_prompt=8"),
    *("actor.gradient_checkpointing=full",),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("8b"), "8B")


def planned(model, *overrides, **options):
    config = configured([*JOB, f"model.path={model}", *overrides])
    return build_job_plan(config, CLUSTER, lengths=LENGTHS, rates=RATES, **options)


def seconds(plan, phase="generate"):
    return plan.times.phases["actor", phase]


def test_more_cache_is_less_time(model):
    """Half a device holds 31 samples of 5,120 tokens beside weights and vLLM's own memory, and 128
    are to be generated; 0.8 of it hold 66."""
    shares = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    plans = [planned(model, f"rollout.memory_share={share}") for share in shares]
    times = [seconds(plan) for plan in plans]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    token = 36 * 2 * 8 * 128 * 2  # bytes: layers, keys and values, heads, their width, bfloat16
    for share, plan in zip(shares, plans, strict=True):
        (device,) = plan.memory
        parts = next(p.parts for p in device.phases if p.phase == "generate")
        cache = share * 79.1 * GIB - 2 * 8.19e9 - 2.5 * GIB
        assert parts["kv_cache"] == pytest.approx(cache, rel=0.02)
        rounds = 128 * 5120 * token / parts["kv_cache"]
        steps = max(rounds, 1) * 4096
        weights = 2 * 8.19e9 / (0.7 * 3.35e12)
        assert seconds(plan) > steps * weights


def test_python_of_a_step_is_hidden_unless_weights_change_in_flight(model):
    """A small share of Python beside much work of the device."""
    apart = ["placement=separation", "placement.staleness=1"]
    option = "rollout.engine_options.async_scheduling=false"
    ahead, waits, in_flight = (
        planned(model, *apart, *more).times.phases["generator", "generate"]
        for more in ([], [option], ["placement.in_flight=true"])
    )
    assert ahead < waits == in_flight


def test_a_cache_of_fewer_bits_holds_more_samples(model):
    half, whole = (
        planned(model, f"rollout.kv_cache={kind}", "rollout.memory_share=0.5")
        for kind in ("fp8", "auto")
    )
    assert seconds(half) < 0.75 * seconds(whole)


def test_samples_that_are_preempted_are_read_again(model):
    """Vast cache: nothing is read twice, however many may run."""
    short = ["rollout.memory_share=0.9", "data.prompts_per_step=8"]  # 8 samples a device
    few, many = (planned(model, *short, f"rollout.max_sequences={n}") for n in (8, 256))
    assert seconds(few) == seconds(many)
    tight = ["rollout.memory_share=0.5"]
    few, many = (planned(model, *tight, f"rollout.max_sequences={n}") for n in (31, 256))
    again = (128 - 31) * (1024 + 4096 / 2) * 2 * 7e9 / (0.45 * 989e12)  # tokens x operations
    assert seconds(many) - seconds(few) == pytest.approx(again, rel=0.3)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.offload_between_calls=true"],
        ["algorithm.kl_coefficient=0.1"],
        ["placement=separation"],
    ],
    ids=["alone", "offloaded", "with a reference", "apart"],
)
def test_the_share_is_what_others_leave(model, overrides):
    plan = planned(model, *overrides)
    share = plan.memory_share
    generating = [
        (sum(p.parts.values()) - share * CLUSTER.memory) / CLUSTER.memory
        for device in plan.memory
        for p in device.phases
        if "kv_cache" in p.parts
    ]
    room = 1 - max(generating)
    assert share <= room - 0.05 + 1e-9 and (share == 0.9 or share + 0.05 > room - 0.05)
    config = configured([*JOB, f"model.path={model}", *overrides])
    assert ("rollout.memory_share", share) in choose_automatic_settings(config, CLUSTER, LENGTHS)


def test_nothing_is_chosen_that_is_set_or_of_no_use(model):
    def chosen(*overrides, cluster=CLUSTER):
        config = configured([*JOB, f"model.path={model}", *overrides])
        return choose_automatic_settings(config, cluster, LENGTHS)

    assert not chosen("rollout.memory_share=0.3")
    assert not chosen("rollout=transformers")


@pytest.mark.more
def test_what_is_offloaded_takes_the_host_s_memory_and_time(tmp_path):
    """Qwen3-32B on one node, which does not fit otherwise."""
    path = write_qwen3(tmp_path, "32B")
    with pytest.raises(ConfigError, match="would fit with") as refused:
        check_plan_fits(planned(path))
    assert "memory_share" not in str(refused.value).partition("would fit")[2]
    plain, offloaded = planned(path), planned(path, "actor.offload_parameters=true")
    parameters = 32.8e9
    assert not plain.host
    # Master weights, gradients and two moments, the first two of them in pinned memory.
    assert 16 * parameters < offloaded.host_bytes < 16 * parameters * 4 / 3
    assert offloaded.host["parameters"] == offloaded.host["gradients"] > 4 * parameters
    slower = seconds(offloaded, "train") - seconds(plain, "train")
    (batch,) = offloaded.batches.values()
    shard = 4 * parameters / 8
    taken = batch.count * shard / 45e9  # gradients, back to the host after each micro-batch
    added = (batch.count - 1) * 3 * shard / 60e9
    stepped = 10 * shard / 60e9
    assert slower > 0.9 * (taken + added + stepped)


def changed(plan, settings, model):
    """Whether a plan with these settings differs in any byte or second."""
    config = apply_changes(plan.config, settings)
    try:
        placement = resolve_placement(config, CLUSTER)
    except ConfigError:  # no such cut of this model
        return True
    other = build_job_plan(config, CLUSTER, placement, LENGTHS, RATES)
    kept = ("memory", "host", "time", "sync_bytes")
    was, now = (json.loads(job_plan_to_json(one)) for one in (plan, other))
    return any(was[name] != now[name] for name in kept)


@pytest.mark.more
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_every_cure_changes_seconds_or_bytes(model, engine):
    base = ["algorithm=ppo", f"rollout={engine}", "actor.gradient_checkpointing=none"]
    share = ["rollout.memory_share=0.2"] if engine == "vllm" else []
    plan = planned(model, *base, *share, "actor.tokens_per_microbatch=65536")
    assert not plan.fits()
    variants = [setting for variant in search_variants(plan.config, CLUSTER) for setting in variant]
    effects = defaultdict(list)
    for setting in dict.fromkeys([*list_candidates(plan), *variants]):
        effects[setting[0]].append(changed(plan, [setting], model))
    assert {"actor.offload_parameters", "actor.offload_between_calls"} <= effects.keys()
    assert all(map(any, effects.values())), effects
    assert find_fitting_settings(plan)


@pytest.mark.more
def test_plan_search_and_what_if_agree(model):
    """One placement, one time."""
    config = configured([*JOB, f"model.path={model}", "rollout.parallel.tp=2"])
    plan = build_job_plan(config, CLUSTER, lengths=LENGTHS, rates=RATES)
    costs = PlannedSearchCosts(config, CLUSTER, RATES, LENGTHS)
    costs.variants = costs.variants[:1]
    report = search_placements(costs, among=[PlacementShape((("actor",),))])
    found = next(f for f in report.best if f.cuts["actor"].parallel.tp == 1)
    run = SimpleNamespace(config=config, cluster=CLUSTER, placement=plan.placement, lengths=LENGTHS)
    step = plan.times.step
    assert planned_times(run).step == pytest.approx(step)
    scores = step - found.step  # reward functions, which a search leaves out
    assert 0 <= scores < 0.01 * step
    assert found.cuts["actor"].memory_share <= plan.memory_share

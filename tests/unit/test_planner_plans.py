"""Plans for machines that are not here: what fits, what would make it fit, and the command."""

import json
from dataclasses import replace

import pytest
from settings import configured
from tiers import few_of

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.cli import main
from hybridrl.config.changed import apply_changes
from hybridrl.errors import ConfigError
from hybridrl.planner.fitting_settings import check_plan_fits, find_fitting_settings
from hybridrl.planner.job_plan import build_job_plan, job_plan_to_json
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.plan_tables import format_step_sizes
from hybridrl.planner.step.step_calls import PlannedCall
from hybridrl.planner.step.step_time import SteadyStateReplay
from hybridrl.system.cluster_spec import ClusterSpec, DeviceSlot, DeviceSpec

PAPER = [  # section 8 of the HybridFlow paper
    "algorithm=ppo",
    "algorithm.kl_coefficient=0.1",
    "model.dtype=bfloat16",
    "data.prompts_per_step=1024",
    "rollout.samples_per_prompt=1",
    "data.max_prompt_tokens=1024",
    "rollout.max_tokens=1024",
    "actor.gradient_checkpointing=true",
    "actor.tokens_per_microbatch=4096",
]
COLOCATED = ("placement=flattening", "rollout.memory_share=0.45")


def placed(kind, devices):
    """Overrides for the placements that the paper compares."""
    if kind == "colocate":
        return list(COLOCATED)
    parts = {  # role: part of all devices
        "split": {"actor": (0, 2), "reference": (0, 2), "critic": (2, 4), "reward": (2, 4)},
        "standalone": {
            "actor": (0, 1),
            "generator": (1, 2),
            "critic": (2, 3),
            "reference": (3, 3.5),
            "reward": (3.5, 4),
        },
    }[kind]
    found = ["placement=explicit", "rollout.memory_share=0.6" if kind == "standalone" else ""]
    found[1] = found[1] or COLOCATED[1]
    for role, (start, end) in parts.items():
        numbers = list(range(int(start * devices / 4), int(end * devices / 4)))
        found.append(f"placement.roles.{role}.devices={numbers}")
    return found


def fits(size, devices, kind):
    tp = {"7b": 1, "70b": 8}[size]
    cuts = ["actor.parallel.tp=1", f"rollout.parallel.tp={tp}"]
    overrides = [*PAPER, f"model.path=llama-{size}", f"reward.model=llama-{size}", *cuts]
    with materialize_named_models(configured([*overrides, *placed(kind, devices)])) as config:
        try:
            return build_job_plan(config, parse_cluster(f"{devices}xA100")).fits()
        except ConfigError as error:  # too few devices for one copy of the model
            assert "divide" in str(error) or "takes" in str(error)
            return False


@pytest.mark.parametrize(
    ("size", "devices", "expected"),
    few_of(
        [
            ("7b", 8, 3),
            ("7b", 64, 3),
            ("7b", 128, 3),
            ("70b", 8, 0),
            ("70b", 64, 2),
            ("70b", 128, 3),
        ],
        [("7b", 8, 3)],
        several=True,
    ),
)
def test_few_devices_leave_only_colocation(size, devices, expected):
    """The fewer the devices, the more of them each model has to be spread over: standalone models
    fit last, colocated ones first."""
    order = ("colocate", "split", "standalone")
    assert [kind for kind in order if fits(size, devices, kind)] == list(order[:expected])


@pytest.mark.more
def test_every_cure_cures():
    overrides = [*PAPER, "model.path=llama-7b", "actor.gradient_checkpointing=false"]
    overrides += ["actor.tokens_per_microbatch=32768"]
    cluster = parse_cluster("8xA100")
    with materialize_named_models(configured(overrides)) as config:
        plan = build_job_plan(config, cluster)
        assert not plan.fits()
        found = find_fitting_settings(plan)
        assert len(found) >= 2
        for cure in found:
            assert build_job_plan(apply_changes(config, cure), cluster).fits(), cure
        names = [cure[0][0] for cure in found]
        assert names[0] == "actor.tokens_per_microbatch"
        with pytest.raises(ConfigError, match=r"It would fit with actor\.tokens_per_microbatch="):
            check_plan_fits(plan)


@pytest.mark.more
def test_cures_come_together_where_none_is_enough():
    overrides = [*PAPER, "model.path=llama-13b", "actor.tokens_per_microbatch=32768"]
    overrides += ["actor.gradient_checkpointing=false"]
    cluster = parse_cluster("4xA100")
    with materialize_named_models(configured(overrides)) as config:
        (found,) = find_fitting_settings(build_job_plan(config, cluster))
        assert len(found) > 1
        assert build_job_plan(apply_changes(config, found), cluster).fits()
        for cure in found:
            fewer = [c for c in found if c != cure]
            assert not build_job_plan(apply_changes(config, fewer), cluster).fits()


@pytest.mark.more
def test_cures_are_for_the_roles_that_are_there():
    """All roles of the job would need two settings at once; the actor alone needs one of them."""
    overrides = [*PAPER, "model.path=llama-13b", "actor.tokens_per_microbatch=32768"]
    overrides += ["actor.gradient_checkpointing=false"]
    cluster = parse_cluster("4xA100")
    with materialize_named_models(configured(overrides)) as config:
        plan = build_job_plan(config, cluster, resolve_placement(config, cluster, ["actor"]))
        assert all(len(cure) == 1 for cure in find_fitting_settings(plan))
        assert any(
            cure[0][0] == "actor.gradient_checkpointing" for cure in find_fitting_settings(plan)
        )


def test_a_judge_may_be_described_too():
    overrides = [*PAPER, "model.path=llama-7b", "reward.judge.path=llama-13b"]
    with materialize_named_models(configured([*overrides, "rollout=transformers"])) as config:
        (device,) = build_job_plan(config, parse_cluster("8xA100")).memory
        assert device.phases[-1].parts["judge"] > 13e9 * 2  # bytes of its weights


@pytest.mark.more
def test_a_job_may_need_a_little_more_than_there_is():
    with materialize_named_models(configured([*PAPER, "model.path=llama-7b"])) as config:
        cluster = parse_cluster("8xA100")
        plan = build_job_plan(config, cluster)
        used = plan.fullest.fullest.bytes

        def of_memory(size):
            smaller = replace(cluster, models={"A100-80GB": DeviceSpec(size)})
            devices = [replace(device, memory=size) for device in plan.memory]
            return replace(plan, cluster=smaller, memory=devices)

        check_plan_fits(of_memory(used / 1.1), tolerance=1.15)
        with pytest.raises(ConfigError, match="does not fit"):
            check_plan_fits(of_memory(used / 1.2), tolerance=1.15)


def test_what_cannot_fit_at_all_says_so():
    with materialize_named_models(configured([*PAPER, "model.path=llama-70b"])) as config:
        cluster = parse_cluster("1xL4")
        with pytest.raises(ConfigError, match="take devices with more memory, or more of them and"):
            check_plan_fits(build_job_plan(config, cluster))


@pytest.mark.more
def test_weights_too_large_for_a_few_devices_are_cut_over_more():
    """Devices of other copies do not help a generator whose part of a copy has no room."""
    overrides = ["model.path=llama-70b", "model.dtype=bfloat16", "rollout.memory_share=0.15"]
    with (
        materialize_named_models(configured([*PAPER, *overrides])) as config,
        pytest.raises(ConfigError, match=r"It would fit with .*rollout\.parallel\.tp=16"),
    ):
        check_plan_fits(build_job_plan(config, parse_cluster("1x16xH100")))


def test_json_is_a_placement(tmp_path):
    overrides = [*PAPER, "model.path=llama-7b", "placement=separation"]
    with materialize_named_models(configured(overrides)) as config:
        cluster = parse_cluster("8xA100")
        plan = build_job_plan(config, cluster, rates=DeviceRates.known(cluster, "bfloat16"))
        (tmp_path / "plan.json").write_text(job_plan_to_json(plan))
        again = [*overrides[:-1], "placement=file", f"placement.path={tmp_path}/plan.json"]
        config.placement = configured(again).placement
        found = resolve_placement(config, cluster)
    assert found.roles == plan.placement.roles


def test_roles_that_share_devices_take_turns_and_others_do_not():
    calls = [
        (PlannedCall("actor", "generate", 1), 4.0),
        (PlannedCall("reward", "score", 1), 2.0),
        (PlannedCall("reference", "score", 1), 3.0),
        (PlannedCall("actor", "train", 1), 4.0),
    ]
    together = {"actor": [0, 1], "reward": [0, 1], "reference": [0, 1]}
    assert SteadyStateReplay(calls, together, 0).seconds == 13
    apart = {"actor": [0, 1], "reward": [0], "reference": [1]}
    assert SteadyStateReplay(calls, apart, 0).seconds == 11


def test_staleness_overlaps_generation_with_training():
    calls = [
        (PlannedCall("generator", "generate", 1), 4.0),
        (PlannedCall("reward", "score", 1), 1.0),
        (PlannedCall("actor", "train", 1), 6.0),
    ]
    devices = {"generator": [1], "reward": [1], "actor": [0]}
    assert SteadyStateReplay(calls, devices, 0).seconds == 11
    assert SteadyStateReplay(calls, devices, 1).seconds == 6


def test_more_devices_are_faster():
    def step(devices):
        overrides = [*PAPER, "model.path=llama-7b"]
        cluster = parse_cluster(f"{devices}xH100")
        with materialize_named_models(configured(overrides)) as config:
            plan = build_job_plan(config, cluster, rates=DeviceRates.known(cluster, "bfloat16"))
        return plan.times.step

    assert step(8) > 1.5 * step(16)


def test_a_plan_says_that_it_does_not_count_partial_rollouts(capsys):
    for value in ("null", "0.5"):
        with pytest.raises(SystemExit):
            given = ["model.path=llama-7b", *PAPER, f"rollout.partial={value}"]
            main(["plan", *given, "--devices", "16xH100"])
        shown = " ".join(capsys.readouterr().out.split())
        told = (
            "does not count rollout.partial: it assumes that each step waits for all its samples."
        )
        assert (told in shown) == (value != "null")


def test_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "model.path=llama-7b", *PAPER, "--json", "--devices", "16xH100"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["time"]["step"] > 0
    assert found["roles"]["critic"]["devices"] == list(range(16))
    assert found["settings"].keys() == {
        "rollout.memory_share"
    }  # nothing else is left to the planner


def test_json_has_the_settings_that_were_chosen(capsys):
    null = ["actor.tokens_per_microbatch=null", "reward.processes=null"]
    with pytest.raises(SystemExit):
        main(["plan", "model.path=llama-7b", *null, "--json", "--devices", "16xH100"])
    found = json.loads(capsys.readouterr().out)
    tokens = found["settings"].pop("actor.tokens_per_microbatch")
    assert tokens >= 1024  # cores of those nodes are not known
    assert found["settings"].pop("actor.gradient_checkpointing") == "none"
    assert found["settings"].pop("actor.parallel.shards") == 8  # on two nodes
    assert found["settings"].keys() == {"rollout.memory_share"}
    assert found["micro_batches"]["actor/train"]["tokens"] <= tokens


def test_the_command_refuses_with_a_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "model.path=llama-7b", *PAPER, "--devices", "1xL4"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "where roles live" in said.out
    assert "GiB" in said.err and "Traceback" not in said.err


SLOW = DeviceRates(1e12, 1e12, 0, 0, 1e10, 1e9, 1e7, 1.0, 1e-6, "a test")


@pytest.mark.parametrize(
    ("cluster", "network", "setting", "ways"),
    [
        ("2x2xL40S", 1e7, "full", {"full"}),
        ("2x2xL40S", 1e7, "bfloat16", {"bfloat16"}),
        ("2x2xL40S", 1e7, "int8", {"int8"}),
        ("2x2xL40S", 1e7, "two_level_int4", {"int8+int4"}),
        ("2x1xL40S", 1e7, "two_level_int4", {"int4"}),
        ("4xL40S", 1e7, "two_level_int4", {"int8"}),
        ("2x2xL40S", 1e7, "auto", {"float32+int4", "int8+int4"}),
        ("2x1xL40S", 1e7, "auto", {"int4"}),
        ("4xL40S", 1e12, "auto", {"full"}),
    ],
)
def test_sums_of_gradients_are_reckoned_as_the_setting_says(cluster, network, setting, ways):
    rates = replace(SLOW, network=network, link=max(SLOW.link, network))
    found = {}
    for kind in ("full", setting):
        overrides = [*PAPER, "model.path=llama-7b", f"actor.parallel.gradients={kind}"]
        with materialize_named_models(configured([*overrides, "reward.function=null"])) as config:
            devices = parse_cluster(cluster)
            each = [rates] * len(devices.devices)
            found[kind] = build_job_plan(config, devices, rates=each)
    plan = found[setting]
    sums = plan.times.sums["actor"]
    assert len(sums.ways) == 33  # layers, and what is around them
    assert set(sums.ways) <= ways
    lines = "\n".join(format_step_sizes(plan))
    assert (f"actor.parallel.gradients={setting}: " in lines) == (setting != "full")
    assert json.loads(job_plan_to_json(plan))["gradients"]["actor"]["ways"] == list(sums.ways)
    trains = plan.times.phases["actor", "train"]
    full = found["full"].times.phases["actor", "train"]
    if ways == {"full"}:
        assert trains == full
    elif cluster.startswith("2x"):
        assert trains < full
    else:  # one node's link is hidden by the backward, and codecs are not
        assert trains > full


@pytest.mark.parametrize(
    ("nodes", "overrides", "counts"),
    [
        (1, [], False),  # within a node `auto` is `full`
        (1, ["rollout.weight_sync=delta"], True),
        (2, [], True),
        (2, ["placement.staleness=2"], True),
        (2, ["rollout.weight_sync=full"], False),
    ],
)
def test_records_of_weights_are_counted_where_differences_may_travel(nodes, overrides, counts):
    overrides = [*PAPER, "model.path=llama-7b", "placement=separation", *overrides]
    devices = [
        DeviceSlot("cpu", f"node{node}", 0, "a core")
        for node in range(nodes)
        for _ in range(2 // nodes)
    ]
    with materialize_named_models(configured(overrides)) as config:
        plan = build_job_plan(config, ClusterSpec(devices, {"a core": DeviceSpec(1e12)}))
    phases = [phase for device in plan.memory for phase in device.phases]
    assert any("weight record" in phase.parts for phase in phases) == counts

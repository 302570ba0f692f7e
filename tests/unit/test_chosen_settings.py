"""Settings that are left to the planner, and how often steps are saved."""

import math

import pytest
from scipy.optimize import minimize_scalar

from hybridrl.checkpoint import saver as when_to_save
from hybridrl.checkpoint.save_schedule import SaveSchedule, optimal_interval
from hybridrl.config.changed import apply_changes
from hybridrl.config.schema import CheckpointConfig
from hybridrl.job.config_resolution import load_config
from hybridrl.planner import fitting_settings as chosen_settings
from hybridrl.planner.fitting_settings import choose_automatic_settings
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.step.step_calls import SampleLengths


@pytest.mark.parametrize("cost", [0.1, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("between", [3600.0, 86400.0])
def test_the_interval_wastes_least(cost: float, between: float) -> None:
    # A run of one second's work, of which all since the last checkpoint is lost at a failure
    # (Daly 2006, equation 20).
    def seconds(interval: float) -> float:
        return between * math.expm1((interval + cost) / between) / interval

    best = minimize_scalar(seconds, bounds=(cost / 100, between), method="bounded").x
    assert seconds(optimal_interval(cost, between)) == pytest.approx(seconds(best), rel=1e-3)


def test_a_checkpoint_that_takes_longer_than_the_job_lives() -> None:
    assert optimal_interval(100.0, 40.0) == 40.0
    assert optimal_interval(0.0, 3600.0) == 0.0


def test_steps_are_saved_by_what_the_last_one_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(when_to_save.time, "monotonic", lambda: now[0])
    when = SaveSchedule(CheckpointConfig(every_minutes=None), 8)
    assert when.is_due(1, 100)  # what it costs is not known
    when.begins()
    assert not when.is_due(2, 100)  # while the first is being written
    when.ends(0.5)
    interval = optimal_interval(0.5, 50_000 * 3600.0 / 8)
    now[0] = interval - 1
    assert not when.is_due(3, 100)
    now[0] = interval + 1
    assert when.is_due(4, 100)
    assert not SaveSchedule(CheckpointConfig(), 8).is_due(100, 100)


@pytest.mark.more
def test_micro_batches_have_room() -> None:
    cluster = parse_cluster("8xA100-40GB")
    settings = ["model.path=llama-7b", "actor.tokens_per_microbatch=null", "reward.processes=4"]
    settings += ["rollout.max_tokens=1024", "actor.parallel.tp=2", "rollout.memory_share=0.5"]
    settings += ["actor.gradient_checkpointing=none"]
    with materialize_named_models(load_config(settings), None) as config:
        found = choose_automatic_settings(config, cluster)
        ((name, tokens),) = found
        assert name == "actor.tokens_per_microbatch"
        plan = build_job_plan(apply_changes(config, found), cluster)
        assert plan.fullest.filled <= 0.9
        more = build_job_plan(apply_changes(config, [(name, 2 * tokens)]), cluster)
        assert more.fullest.filled > 0.9


@pytest.mark.parametrize(
    ("cluster", "settings", "shards"),
    [
        ("4x8xH100@100Gbps", [], 8),
        ("4x8xH100", [], 8),  # whose weight syncs bring each tensor in fewer parts
        # Without any, computation takes longer than what goes through such a network.
        ("4x8xH100", ["algorithm=sft", "data=jsonl", "data.path=rows.jsonl"], None),
        pytest.param("4x8xH100@100Gbps", ["actor.parallel.tp=2"], 4, marks=pytest.mark.more),
        pytest.param(
            "4x8xH100@100Gbps", ["actor.parallel.shards=32"], None, marks=pytest.mark.more
        ),
        pytest.param(  # no room for it twice
            *("2x8xA100-40GB@50Gbps", ["model.path=llama-34b"], None), marks=pytest.mark.more
        ),
        pytest.param("8xH100", [], None, marks=pytest.mark.more),
    ],
)
def test_parameters_are_shared_within_a_node_where_that_is_quicker_and_fits(
    cluster: str, settings: list[str], shards: int | None
) -> None:
    base = ["model.path=llama-7b", "rollout.max_tokens=1024", "actor.gradient_checkpointing=true"]
    with materialize_named_models(load_config([*base, *settings]), None) as config:
        found = dict(choose_automatic_settings(config, parse_cluster(cluster)))
        assert found.get("actor.parallel.shards") == shards


def test_a_micro_batch_takes_the_longest_sample() -> None:
    cluster = parse_cluster("1xH100")
    settings = ["model.path=llama-7b", "actor.tokens_per_microbatch=null"]
    with materialize_named_models(load_config(settings), None) as config:
        found = dict(
            choose_automatic_settings(config, cluster, SampleLengths.alike(30_000, 30_000))
        )
        assert found["actor.tokens_per_microbatch"] >= 60_000


def test_processes_are_the_cores_that_devices_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ = ["rollout.memory_share=0.5", "actor.gradient_checkpointing=none"]
    config = load_config(["reward.processes=null", *set_])
    for cores, processes in ((2, 1), (64, 7), (2048, 16)):
        monkeypatch.setattr(chosen_settings, "count_usable_cores", lambda cores=cores: cores)
        assert choose_automatic_settings(config, parse_cluster("8xH100")) == [
            ("reward.processes", processes)
        ]


def test_what_is_set_stays() -> None:
    config = load_config(["actor.gradient_checkpointing=none", "rollout.memory_share=0.5"])
    assert choose_automatic_settings(config, parse_cluster("8xH100")) == []


@pytest.mark.parametrize(
    ("devices", "tokens", "more", "kept"),
    [
        ("64xH100", 4096, [], "none"),
        ("8xH100", 16384, [], "selective"),
        ("8xH100", 24576, [], "block"),
        ("8xH100", 16384, ["actor.parallel.ring=2"], "full"),
        ("8xH100", 65536, [], "full"),
    ],
)
def test_layers_keep_what_there_is_memory_for(devices, tokens, more, kept) -> None:
    cluster = parse_cluster(devices)
    settings = ["model.path=llama-7b", f"actor.tokens_per_microbatch={tokens}", *more]
    settings += ["rollout.max_tokens=1024", "reward.processes=4", "rollout.memory_share=0.5"]
    with materialize_named_models(load_config(settings), None) as config:
        setting, chosen = "actor.gradient_checkpointing", choose_automatic_settings(config, cluster)
        assert dict(chosen)[setting] == kept
        quicker = chosen_settings.KEPT[: chosen_settings.KEPT.index(kept)]
        for mode in quicker[:1] if more else quicker:  # a ring keeps all or nothing
            plan = build_job_plan(apply_changes(config, [(setting, mode)]), cluster)
            assert plan.fullest.filled > 0.9
        plan = build_job_plan(apply_changes(config, chosen), cluster)
        assert kept == "full" or plan.fullest.filled <= 0.9


def test_an_open_share_of_vllm_takes_what_training_leaves() -> None:
    cluster = parse_cluster("8xH100")
    base = ["model.path=llama-7b", "actor.tokens_per_microbatch=null", "reward.processes=4"]
    base += ["rollout.max_tokens=1024"]
    found = []
    for share in ("0.3", "null"):  # with the first nothing is fuller than training
        with materialize_named_models(
            load_config([*base, f"rollout.memory_share={share}"]), None
        ) as config:
            found.append(dict(choose_automatic_settings(config, cluster)))
    small, filled = found
    assert filled.pop("rollout.memory_share") > 0.3
    assert filled == small

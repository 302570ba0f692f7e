"""What is proposed for a job: quickest by the plan itself, and what a start would accept."""

import json

import pytest
from settings import configured
from transformers import LlamaConfig

from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.cli import main
from hybridrl.commands import plan_search
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.placement import Placement
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.search.proposals import (
    cost_objective,
    fewest_devices_objective,
    parse_prices,
    propose_placements,
)

GRPO = [
    *("model.dtype=bfloat16", "placement=auto"),
    *("data.prompts_per_step=512", "data.max_prompt_tokens=512", "rollout.max_tokens=512"),
]
PPO = ["algorithm=ppo", "algorithm.kl_coefficient=0.1", *GRPO]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return written(tmp_path_factory.mktemp("model"), layers=4)


def written(folder, layers):
    LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
    ).save_pretrained(folder)
    return str(folder)


def proposals(model, devices, *overrides, job=PPO, **options):
    cluster = parse_cluster(devices)
    config = configured([*job, f"model.path={model}", f"reward.model={model}", *overrides])
    rates = DeviceRates.known(cluster, "bfloat16")
    return propose_placements(config, cluster, rates, **{"deadline_s": 600, **options})


@pytest.fixture(scope="module")
def quickest(model):
    return proposals(model, "2xL4").best[0]


@pytest.mark.more
def test_what_is_proposed_is_what_a_start_would_plan(model):
    found = proposals(model, "4xL4")
    assert found.report.complete and len(found.best) == 5
    steps = [one.found.step for one in found.best]
    assert steps == sorted(steps)
    assert len({one.found.shape for one in found.best}) == 5
    cluster = parse_cluster("4xL4")
    for one in found.best:
        assert one.plan.times.step == pytest.approx(one.found.step)
        placement = Placement.from_json(one.to_json())
        assert resolve_placement(one.plan.config, cluster, chosen=placement) == placement
        assert build_job_plan(one.plan.config, cluster, placement).fits()


BY_HAND = [
    ["placement.strategy=flattening"],
    ["placement.strategy=flattening", "rollout.parallel.tp=2"],
    ["placement.strategy=interleaving"],
    ["placement.strategy=separation"],
    ["placement.strategy=flattening", "actor.parallel.tp=2"],
    ["placement.strategy=flattening", "actor.parallel.pp=2"],
]


@pytest.mark.more
@pytest.mark.parametrize("overrides", BY_HAND, ids=" ".join)
def test_nothing_by_hand_is_quicker(model, quickest, overrides):
    cluster = parse_cluster("2xL4")
    config = configured([*PPO, f"model.path={model}", f"reward.model={model}", *overrides])
    plan = build_job_plan(config, cluster, rates=DeviceRates.known(cluster, "bfloat16"))
    assert quickest.found.step <= plan.times.step * (1 + 1e-9)


def test_what_is_set_by_hand_stays(model):
    found = proposals(model, "2xL4", "actor.parallel.tp=2", "rollout.parallel.tp=2", job=GRPO)
    for one in found.best:
        assert one.placement.roles["actor"].parallel.tp == 2
        assert not {"rollout.parallel.tp", "actor.parallel.tp"} & dict(one.settings).keys()


def test_memory_is_the_first_cut(model):
    """What does not fit as asked gets settings with which it does."""
    tight = ["actor.tokens_per_microbatch=262144", "rollout.max_tokens=3000"]
    found = proposals(model, "2xL4", *tight, job=GRPO)
    assert all(one.plan.fits() for one in found.best)
    assert any(one.settings for one in found.best)


@pytest.mark.more
def test_what_cannot_fit_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"placement=auto found nothing that fits 1 x L4"):
        proposals(written(tmp_path, layers=2000), "1xL4")


def test_a_search_that_found_nothing_in_time_says_so(model):
    with pytest.raises(ConfigError, match=r"when its 1e-09 s were over"):
        proposals(model, "1xL4", deadline_s=1e-9)


@pytest.mark.more
def test_cheap_and_few(model):
    quickest = proposals(model, "4xL4").best[0]
    dear = proposals(
        model, "4xL4", objective=cost_objective(parse_prices("L4=0.7"), parse_cluster("4xL4"))
    )
    used = len(dear.best[0].plan.cluster.devices)
    assert dear.best[0].found.step * used <= quickest.found.step * 4 * (1 + 1e-9)
    slow = fewest_devices_objective(within_s=quickest.found.step * 2.5)
    few = proposals(model, "4xL4", objective=slow).best[0]
    assert few.found.step <= quickest.found.step * 2.5
    assert len(few.plan.cluster.devices) < 4
    assert dict(few.settings)["num_devices"] == len(few.plan.cluster.devices)
    with pytest.raises(ConfigError, match="L4 has no price"):
        cost_objective(parse_prices("H100=2"), parse_cluster("4xL4"))
    with pytest.raises(ConfigError, match="dollars an hour"):
        parse_prices("H100")


def test_the_command(model, capsys, tmp_path):
    words = [*PPO[:-1], f"model.path={model}", f"reward.model={model}", "rollout.max_tokens=512"]
    asked = ["plan", "--search", *words, "--devices", "2xH100", "--out", f"{tmp_path}/mine.json"]
    with pytest.raises(SystemExit):
        main([*asked, "--price", "H100=2.5"])
    said = capsys.readouterr()
    assert "tokens a dollar" in said.out and "ways were looked at" in said.out
    assert "longer" in said.out or "about as quick" in said.out
    recipe = load_config([*words, f"recipe={tmp_path}/mine.yaml"])
    assert recipe.placement.strategy == "file"
    assert recipe.actor.tokens_per_microbatch  # that it was planned with, not what a start chooses
    written = json.loads((tmp_path / "mine.json").read_text())
    resolve_placement(recipe, parse_cluster(f"{recipe.num_devices or 2}xH100"))
    assert written["roles"]["actor"]["devices"]


def test_the_command_leaves_to_the_search_what_is_open(model, monkeypatch):
    found = []

    def propose(config, *_, **__):
        found.append(config)
        raise ConfigError("That is enough.")

    monkeypatch.setattr(plan_search, "propose_placements", propose)
    asked = ["plan", "--search", f"model.path={model}", "--devices", "2xH100"]
    with pytest.raises(SystemExit):
        main([*asked, "rollout.memory_share=null", "actor.gradient_checkpointing=auto"])
    (config,) = found
    assert config.rollout.memory_share is None, "not what flattening has room for"
    assert config.actor.gradient_checkpointing == "none", "from which a search begins"


@pytest.mark.more
def test_reasons_name_fewer_devices_and_what_has_nothing_left_to_do(capsys):
    asked = ["plan", "--search", "algorithm=evaluate", "--devices"]
    with pytest.raises(SystemExit):
        main([*asked, "4xH100"])
    assert "mostly with nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked, "2xH100", "--price", "H100=1"])
    assert "on 2 device(s) (1: 1)" in capsys.readouterr().out


@pytest.mark.more
def test_a_step_is_as_long_as_the_plan_of_what_was_written_says(capsys, tmp_path):
    """Scores of a function too, which take nothing that the search could choose."""
    asked = ["plan", "--devices", "2xH100", "--json"]
    with pytest.raises(SystemExit):
        main([*asked, "--search", "--out", f"{tmp_path}/mine.json"])
    found = json.loads(capsys.readouterr().out)["best"][0]
    with pytest.raises(SystemExit):
        main([*asked, f"recipe={tmp_path}/mine.yaml"])
    planned = json.loads(capsys.readouterr().out)["time"]["step"]
    assert found["step_seconds"] == pytest.approx(planned)


def test_a_plan_of_auto_says_that_it_is_no_search(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--devices", "2xH100", "placement=auto"])
    assert "this is the plan of flattening" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--price", "H100=2"],
        ["--search", "--within=-1"],
        ["--search", "--within=3", "--price", "H100=2"],
        ["--search", "--price", "L4=2"],
    ],
)
def test_options_that_make_no_sense(options, model, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"model.path={model}", "--devices", "2xH100", *options])
    assert ended.value.code == 2
    assert "--price" in capsys.readouterr().err or "--within" in str(options)

"""Strategies, placements as data, and that placements touch nothing else."""

import ast
import copy
import difflib
import pickle
from pathlib import Path

import pytest
from settings import configured

import hybridrl
from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.composition.load import format_config_yaml
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.placement import Placement
from hybridrl.placement.disaggregated_actor import DisaggregatedActor
from hybridrl.system.cluster_spec import ClusterSpec

PPO = ["algorithm=ppo", "algorithm.kl_coefficient=0.1"]


def placed(devices, *overrides):
    config = configured([*PPO, *overrides])
    placement = resolve_placement(config, ClusterSpec.of_one_node("cpu", devices))
    return {role: list(place.devices) for role, place in placement.roles.items()}


def test_flattening_puts_everything_everywhere():
    assert set(map(tuple, placed(4).values())) == {(0, 1, 2, 3)}


def test_interleaving_puts_scoring_roles_on_complementary_halves():
    found = placed(4, "placement=interleaving")
    assert found["actor"] == found["critic"] == [0, 1, 2, 3]
    assert found["reward"] == [0, 1] and found["reference"] == [2, 3]


def test_interleaving_takes_any_shares():
    found = placed(4, "placement=interleaving", "placement.roles.reward.share=0.25")
    assert found["reward"] == [0] and found["reference"] == [1, 2]
    found = placed(
        *(4, "placement=interleaving"),
        *("placement.roles.reward.share=0.75", "placement.roles.reference.share=0.75"),
    )
    assert found["reward"] == [0, 1, 2] and found["reference"] == [0, 1, 3], "pools may overlap"


def test_interleaving_gives_a_cut_model_as_many_devices_as_it_needs():
    cut = ["models.reference.parallel.tp=2", "placement=interleaving"]
    assert placed(2, *cut)["reference"] == [0, 1]


def test_separation_halves_the_devices():
    found = placed(4, "placement=separation")
    assert found["actor"] == found["critic"] == [0, 1]
    assert found["generator"] == found["reference"] == found["reward"] == [2, 3]
    found = placed(
        *(4, "placement=separation", "placement.generation_devices=1"),
        "placement.scoring=training",
    )
    assert found["generator"] == [3] and found["reference"] == [0, 1, 2]


def test_separation_keeps_room_for_the_cuts_of_both_sides():
    found = placed(8, "placement=separation", "rollout.parallel.tp=2", "actor.parallel.tp=2")
    assert len(found["actor"]) == 4 and len(found["generator"]) == 4
    found = placed(6, "placement=separation", "rollout.parallel.tp=2", "actor.parallel.tp=4")
    assert len(found["actor"]) == 4 and len(found["generator"]) == 2


def test_explicit_with_a_generator_separates():
    roles = {"actor": 0, "critic": 0, "reward": 1, "reference": 1, "generator": 1}
    table = [f"placement.roles.{role}.devices=[{device}]" for role, device in roles.items()]
    found = placed(2, "placement=explicit", "placement.staleness=1", *table)
    assert found == {role: [device] for role, device in roles.items()}


def test_a_placement_survives_json_and_editing(tmp_path):
    config = configured([*PPO, "placement=interleaving"])
    text = resolve_placement(config, ClusterSpec.of_one_node("cpu", 4)).to_json()
    file = tmp_path / "placement.json"
    file.write_text(text.replace('"devices": [\n        2,', '"devices": [\n        1,'))
    found = placed(4, "placement=file", f"placement.path={file}")
    assert found["reference"] == [1, 3] and found["reward"] == [0, 1]
    assert Placement.from_json(text).to_json() == text


def test_a_user_brings_a_strategy(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hybridrl.placement import Placement, RolePlace\n"
        "def first_device(roles, cluster, settings):\n"
        "    return Placement('mine', {r.name: RolePlace((0,), r.parallel) for r in roles})\n"
    )
    assert set(map(tuple, placed(2, f"placement.strategy={file}:first_device").values())) == {(0,)}


def test_a_strategy_of_the_users_that_is_none_is_a_sentence():
    with pytest.raises(ConfigError, match=r"(?s)strategy=json:loads: called with .*TypeError"):
        placed(2, "placement.strategy=json:loads")
    with pytest.raises(ConfigError, match=r"strategy=builtins:print gave a NoneType; it must"):
        placed(2, "placement.strategy=builtins:print")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["placement.strategy=flatening"], "Did you mean `flattening`"),
        (["placement=explicit"], "does not say where `actor` lives"),
        (["placement=file"], "needs placement.path"),
        (["placement=file", "placement.path=/nowhere.json"], "there is no such file"),
        (["placement=separation", "placement.generation_devices=4"], "1 to 3 can generate"),
        (
            [
                *("placement=explicit", "placement.roles.critic.devices=[0]"),
                *(f"placement.roles.{role}.devices=[1]" for role in ("reward", "reference")),
                *(f"placement.roles.{role}.devices=[2]" for role in ("actor", "generator")),
            ],
            "on the same device",
        ),
        (["placement=separation", "placement.scoring=both"], "`training` or `generation`"),
        (["placement.staleness=1"], "set placement=separation"),
        (["placement=separation", "placement.in_flight=true"], "placement.staleness=1"),
        (
            ["placement=separation", "placement.staleness=2", "placement.transport=collective"],
            "placement.transport=store",
        ),
        (["placement.roles.reference.share=2"], r"must be in \(0, 1\]"),
        (["placement.roles.reference.device=2"], "Did you mean `devices`"),
        (["models.critic.parallel.tp=3"], "models.critic.parallel: tp=3 takes 3"),
        (
            ["placement=separation", "placement.generation_devices=1", "rollout.parallel.tp=2"],
            "rollout.parallel: tp=2 takes 2 devices",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        placed(4, *overrides)


def test_a_placement_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "placement.json"
    for text, sentence in (
        ('{"roles": {"actor": {"devices": [0]}}}', "says nothing of the role `critic`"),
        ('{"roles": {"actor": {"devices": [9]}}}', "says nothing|numbered 0 to 1"),
        ("[1]", "This is no placement"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            placed(2, "placement=file", f"placement.path={file}")


def test_a_placement_changes_no_other_setting():
    plain = format_config_yaml(load_config(PPO)).splitlines()
    for other in ("interleaving", "separation", "explicit", "file"):
        text = format_config_yaml(load_config([*PPO, f"placement={other}"])).splitlines()
        changed = [d for d in difflib.ndiff(plain, text) if d[0] in "+-"]
        assert changed == ["-   strategy: flattening", f"+   strategy: {other}"]


def test_trainers_and_workers_do_not_know_of_placements():
    root = Path(hybridrl.__file__).parent
    for file in [*(root / "trainers").glob("*.py"), *(root / "workers").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert "placement" not in (node.module or ""), file


def test_a_separated_actor_can_be_copied_and_pickled_like_any_object():
    actor = DisaggregatedActor.__new__(DisaggregatedActor)  # as copy and pickle make one
    actor._trainer, actor._generator = "trainer", "generator"
    for again in (copy.copy(actor), pickle.loads(pickle.dumps(actor))):
        assert again._trainer == "trainer" and again._generator == "generator"

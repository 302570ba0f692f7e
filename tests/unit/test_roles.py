"""What a driver program says of its roles, and what is refused of them before anything starts."""

from types import SimpleNamespace

import pytest
from settings import configured

from hybridrl.checks.check_list import check
from hybridrl.checks.machine.placement_checks import resolve_placement
from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config, DataConfig, JudgeConfig
from hybridrl.controller import Worker
from hybridrl.errors import ConfigError
from hybridrl.job import worker_groups as roles
from hybridrl.system.cluster_spec import ClusterSpec
from hybridrl.trainers import load_roles
from hybridrl.trainers.role_spec import RoleSpec, standard_roles, validate_roles

OWN = """
from hybridrl.controller import Worker
from hybridrl.trainers import grpo
from hybridrl.trainers.trainer import Trainer
from hybridrl.trainers.role_spec import RoleSpec, standard_roles

class Distill(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {**standard_roles("actor", "reward"), "teacher": RoleSpec("reference")}

class Pair(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {**standard_roles("actor", "reward"), "solver": RoleSpec("actor", saves_as="solver")}

class Misspelt(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {"actor": RoleSpec("actr")}

class Unknown(grpo.Trainer):
    @staticmethod
    def roles(config):
        return ["actor", "teacher"]

class Bare(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {"actor": "actor"}

class SameFolder(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {name: RoleSpec("actor", saves_as="model") for name in ("actor", "b")}

class NoActor(grpo.Trainer):
    @staticmethod
    def roles(config):
        return {"a": RoleSpec("actor"), "b": RoleSpec("actor"), **standard_roles("reward")}

class Judge(Worker):
    pass

class Settings(grpo.Trainer):
    @staticmethod
    def roles(config):
        judge = RoleSpec(Judge, takes=("strictness",))
        return {**standard_roles("actor", "reward"), "judge": judge}
"""
HERE = ["devices=cpu", "executor=inline", "rollout=transformers"]


@pytest.fixture
def named(tmp_path):
    """`trainer.name=` of a class of `OWN`."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"trainer.name={tmp_path}/own.py:{name}"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("Misspelt", [], "There is no kind of worker `actr`.*Did you mean `actor`"),
        ("Unknown", [], "There is no role `teacher`; there are actor.*RoleSpec"),
        ("Bare", [], "describes the role `actor` by 'actor', which is no RoleSpec"),
        ("SameFolder", [], "saves both `actor` and `b` in the folder `model`"),
        ("NoActor", [], r"warmup.steps=\d+ trains the role `actor`.*Set warmup.steps=0"),
        ("Distill", ["models.teachr.path=x"], "has no role `teachr`.*Did you mean `teacher`"),
        ("Distill", ["models.teacher.pth=x"], r"no setting `models.teacher.pth`.*Did you mean"),
        ("Distill", ["models.teacher.optimizer.learning_rate=1"], "takes path, parallel"),
        ("Distill", ["models.teacher.path=./none"], r"models.teacher.path=./none: there is no"),
        ("Distill", ["models.teacher.path=3"], "must be a folder or a hub name"),
        ("Distill", ["models.teacher=big"], "is a group of settings"),
        ("Distill", ["models.teacher.parallel.tq=2"], "Did you mean `tp`"),
        ("Distill", ["models.teacher.parallel.tp=two"], "models.teacher.parallel.tp=two: "),
        ("Distill", ["models.actor.path=x"], "models.actor.path is called model.path"),
        ("Distill", ["models.reward.path=x"], "models.reward.path is called reward.model"),
        ("Pair", ["models.solver.optimizer.rate=1"], "no setting `models.solver.optimizer.rate`"),
        ("Pair", ["models.solver.optimizer.learning_rate=fast"], "learning_rate=fast: "),
        ("Settings", ["models.judge.strictnes=1"], "Did you mean `strictness`"),
    ],
)
def test_what_is_wrong_with_roles_is_a_sentence(named, name, overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(configured([*HERE, named(name), *overrides]))


def test_roles_of_the_users_are_checked_and_placed(named):
    check(configured([*HERE, named("Settings"), "models.judge.strictness=3"]))
    config = configured([*HERE, named("Pair"), "models.solver.optimizer.learning_rate=1e-4"])
    check(config)
    assert parse_role_model(config, "solver").optimizer_of(config.actor.optimizer) != (
        config.actor.optimizer
    )
    cluster = ClusterSpec.of_one_node("cpu", 4)
    for strategy in ("flattening", "interleaving", "separation"):
        for name, role in (("Distill", "teacher"), ("Pair", "solver")):
            config = configured([*HERE, named(name), f"placement={strategy}"])
            placement = resolve_placement(config, cluster)
            assert {"actor", role} <= placement.roles.keys()
            assert placement.is_separated == (strategy == "separation")
    assert placement.roles["solver"].devices == placement.roles["actor"].devices
    devices = [f"placement.roles.{role}.devices=[1]" for role in ("actor", "reward", "teacher")]
    config = configured([*HERE, named("Distill"), "placement=explicit", *devices])
    assert resolve_placement(config, cluster).roles["teacher"].devices == (1,)


def test_a_teacher_is_cut_as_its_settings_say(named):
    cut = configured([*HERE, named("Distill"), "models.teacher.parallel.tp=2"])
    placement = resolve_placement(cut, ClusterSpec.of_one_node("cpu", 4))
    assert placement.roles["teacher"].parallel.tp == 2 and placement.roles["actor"].parallel.tp == 1
    with pytest.raises(ConfigError, match=r"models\.teacher\.parallel: tp=3 takes 3 devices"):
        cut.models["teacher"]["parallel"]["tp"] = 3
        resolve_placement(cut, ClusterSpec.of_one_node("cpu", 4))


def test_how_a_model_is_cut_is_no_longer_said_of_its_place():
    with pytest.raises(ConfigError, match=r"Set models\.reference\.parallel"):
        overrides = ["algorithm.kl_coefficient=1", "placement.roles.reference.parallel.tp=2"]
        resolve_placement(configured(overrides), ClusterSpec.of_one_node("cpu", 2))


def test_with_adapters_the_actor_is_its_own_reference_and_no_teacher(named):
    adapters = ["actor.lora.rank=4", "algorithm.kl_coefficient=0.1"]
    cluster = ClusterSpec.of_one_node("cpu", 2)
    config = configured([*HERE, *adapters])
    assert "reference" not in resolve_placement(config, cluster).roles
    config = configured([*HERE, named("Distill"), *adapters, "models.teacher.path=somewhere/else"])
    assert "teacher" in resolve_placement(config, cluster).roles


def test_what_follows_from_a_kind():
    found = standard_roles("actor", "critic", "reference", "reward")
    assert [spec.trains for spec in found.values()] == [True, True, False, False]
    assert RoleSpec("actor", trains=False).trains is False
    config = configured(["models.critic.path=a/critic"])
    assert found["reference"].is_copy("reference", config)
    assert not found["critic"].is_copy("critic", config)
    assert not found["actor"].is_copy("actor", config)
    assert found["actor"].is_copy("solver", config)


@pytest.mark.parametrize(
    "overrides", [[], ["algorithm=ppo"], ["algorithm=safe_rlhf"], ["trainer.name=evaluate"]]
)
def test_what_is_saved(overrides):
    found = load_roles(configured(overrides))
    saved = {role: spec.saves_as for role, spec in found.items() if spec.saves_as}
    expected = {"actor": "model"}
    expected |= {role: role for role in ("critic", "cost_critic") if role in found}
    assert saved == ({} if "trainer.name=evaluate" in overrides else expected)


def test_names_are_enough_for_standard_roles():
    assert validate_roles(["actor", "cost_critic"], "here") == standard_roles(
        "actor", "cost_critic"
    )


@pytest.mark.parametrize("worker", ["reference", "reward", Worker])
def test_a_role_that_cannot_be_saved_says_so_before_anything_starts(worker):
    with pytest.raises(
        ConfigError, match=r"saves_as='teacher'\): .* has none\. Leave saves_as out"
    ):
        RoleSpec(worker, saves_as="teacher")


@pytest.mark.parametrize("own", [None, {"effort": "high"}, {"thinks": 1}])
def test_a_judge_has_the_options_of_the_job_unless_it_has_its_own(own, monkeypatch):
    judge = JudgeConfig(path="judge", chat_template_options=own)
    data = DataConfig(chat_template_options={"effort": "low"}, date="2024-07-26")
    config = Config(data=data)
    tokenizer = SimpleNamespace(chat_template="{{ effort }}", name_or_path="judge")
    monkeypatch.setattr(roles, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(roles, "find_end_tokens", lambda *_: (0,))
    job = SimpleNamespace(
        config=config,
        name="job",
        model_path="m",
        tokenizer_path="m",
        tokenizer=None,
        context_length=9,
    )
    if own == {"thinks": 1}:
        with pytest.raises(ConfigError, match=r"reward\.judge\.chat_template_options\.thinks"):
            roles._make_judge_source(job, "reward", judge)
        return
    template = roles._make_judge_source(job, "reward", judge).source.template
    assert template.options == (own or {"effort": "low"}) and str(template.date) == "2024-07-26"

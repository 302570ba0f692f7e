"""The optimizers that settings name: what they step, what they remember, and what is refused."""

import pytest
import torch
from engine_cases import CLIPPED, CPU, TEMPERATURE, make_batch, make_engine, parameters
from parallel_cases import make_model
from settings import configured
from tiers import few_of
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.engine_state.training_state import load_training_state, save_training_state
from hybridrl.checks.check_list import check
from hybridrl.compress.dynamic_codes import BlockCodes, encode_blocks
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.models.hidden_matrices import list_hidden_matrices
from hybridrl.models.lora import add_adapters
from hybridrl.models.model_shape import compute_model_shape
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel import fsdp
from hybridrl.planner.memory.model_part import ModelPart
from hybridrl.planner.memory.optimizer_memory import count_state_bytes

USERS = """
import torch

class Base(torch.optim.Optimizer):
    def __init__(self, params, lr, power=1.0):
        super().__init__(params, {"lr": lr, "power": power})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.remember(group, self.state[p], p)

    def remember(self, group, state, p):
        pass

class Squares(Base):
    def remember(self, group, state, p):
        state["rows"] = p.new_zeros(len(p), 1)

class Counts(Base):
    def remember(self, group, state, p):
        group["k"] = group.get("k", 0) + 1

class Says(Base):
    def remember(self, group, state, p):
        state["text"] = "more"

class Fails(Base):
    def remember(self, group, state, p):
        raise RuntimeError("no matrix")

class Mean(Base):
    def remember(self, group, state, p):
        state["mean"] = torch.zeros_like(p)

class Aside(Base):
    def remember(self, group, state, p):
        self.total = getattr(self, "total", 0) + p.grad
        p.data -= group["lr"] * self.total

class EveryTenth(Base):
    def remember(self, group, state, p):
        self.count = getattr(self, "count", 0) + 1
        p.data -= group["lr"] * (self.count % 10 == 0)

class Late(Base):
    def remember(self, group, state, p):
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 5:
            state["mean"] = torch.zeros_like(p)

class Noisy(Base):
    def remember(self, group, state, p):
        state["step"] = state.get("step", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.grad + torch.randn_like(p), 0.1)
        p.data -= group["lr"] / state["step"] * mean

class Even(Mean):
    elementwise = True

def function(params, lr):
    pass
"""
JOB = ["devices=cpu", "run.dry=true"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["name=lion"], r"must be one of adamw, muon, adafactor, or one of yours"),
        (["options={momentum: 0.9}"], r"options has `momentum`, which .*name=adamw does not take"),
        (["name=muon", "options={momentum: 2}"], r"options\.momentum=2: must be a number from 0"),
        (["name=muon", "options={ns_steps: 0}"], r"options\.ns_steps=0: must be a number from 1"),
        (["name=adafactor", "moments=int8"], r"name=adafactor keeps others\. Leave"),
        (["name=adafactor", "betas=[0.9,0.99]"], r"betas=\[0\.9, 0\.99\] is of adamw and muon"),
        (["name=users.py:Squares"], r"it remembers `rows`, a tensor of shape \[\d, 1\]"),
        (["name=users.py:Counts"], r"its steps change `k` of its parameter groups"),
        (["name=users.py:Says"], r"it remembers `text`, a str, which no checkpoint"),
        (["name=users.py:Aside"], r"depend on more than it remembers .* in no attribute"),
        (["name=users.py:EveryTenth"], r"depend on more than it remembers"),
        (["name=users.py:Late"], r"it remembers `mean` of a parameter only after its step 2"),
        (["name=users.py:Fails"], r"its step raised RuntimeError: no matrix"),
        (["name=users.py:Mean", "options={decay: 1}"], r"raised TypeError: .*decay"),
        (["name=users.py:function"], r"is no subclass of torch\.optim\.Optimizer"),
        (["name=users.py:Nobody"], r"Nobody"),
    ],
)
def test_what_cannot_be_trained_or_saved_is_refused(tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users.py").write_text(USERS)
    with pytest.raises(ConfigError, match=said):
        check(configured([*JOB, *(f"actor.optimizer.{one}" for one in settings)]))


def test_of_a_cut_matrix_only_elementwise_steps_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users.py").write_text(USERS)
    cut = [*JOB, "num_devices=2", "actor.parallel.tp=2"]
    with pytest.raises(ConfigError, match=r"Mean gets parts .*`elementwise = True`"):
        check(configured([*cut, "actor.optimizer.name=users.py:Mean"]))
    check(configured([*cut, "actor.optimizer.name=users.py:Even"]))
    check(configured([*JOB, "actor.optimizer.name=users.py:Noisy"]))


def test_hidden_matrices_are_those_of_layers():
    model = make_model("qwen3_moe", tied=False)
    hidden, names = list_hidden_matrices(model), {n for n, _ in model.named_parameters()}
    first = {n for n in names if n.startswith("model.layers.0.")}
    left = {n.removeprefix("model.layers.0.") for n in first - hidden}
    assert {n for n in left if "norm" not in n} == {"mlp.gate.weight"}
    assert not {n for n in hidden if ".layers." not in n}
    with torch.random.fork_rng(devices=[]):
        add_adapters(model, LoraAdapterConfig(rank=2))
    assert any(".lora_A." in n for n in list_hidden_matrices(model))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_eight_bits_are_near_and_stay(signed):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 300, generator=generator)
    values[2] = 0
    values = (
        values if signed else values.square() * 10 ** (-9 * torch.rand(5, 300, generator=generator))
    )
    codes = encode_blocks(values, signed)
    found, again = codes.decode(), encode_blocks(codes.decode(), signed)
    assert torch.equal(again.codes, codes.codes) and torch.equal(again.scales, codes.scales)
    assert torch.equal(found == 0, values == 0) or signed
    assert float((found - values).abs().max()) < 0.01 * float(values.abs().max())


BYTES = {
    "adamw": OptimizerConfig(),
    "bfloat16": OptimizerConfig(moments="bfloat16"),
    "int8": OptimizerConfig(moments="int8"),
    "muon": OptimizerConfig(name="muon"),
    "muon in int8": OptimizerConfig(name="muon", moments="int8"),
    "adafactor": OptimizerConfig(name="adafactor"),
}


@pytest.mark.parametrize("optimizer", few_of(BYTES, ["int8", "muon", "adafactor"]))
def test_a_plan_counts_what_an_optimizer_remembers(mesh, optimizer):
    config = BYTES[optimizer]
    engine = make_engine(mesh, optimizer=config)
    engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE)
    shape = compute_model_shape(engine.model.inner.config, "float32")
    part = ModelPart(
        *(shape, shape.layers, (True, True), 1, 1),
        **{"trains": True, "device": "cpu"},
        **{"offload_parameters": False, "offload_optimizer": False},
    )
    assert count_state_bytes(config, part, shape) == sum(map(held, states(engine)))


def states(engine):
    for state in engine.optimizer.state.values():
        yield from state.values()


def held(value):
    if isinstance(value, BlockCodes):
        return value.codes.nbytes + value.scales.nbytes
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.nbytes if value.ndim else 0


@pytest.mark.parametrize("optimizer", few_of(BYTES, ["muon in int8"]))
def test_a_state_is_gone_on_from_bit_for_bit(mesh, tmp_path, optimizer):
    config, batch = BYTES[optimizer], make_batch()
    engine, again = (make_engine(mesh, optimizer=config) for _ in range(2))
    engine.update(batch, CLIPPED, temperature=TEMPERATURE)
    save_training_state(engine, tmp_path / "state")
    again.update(batch, CLIPPED, temperature=0.3)
    load_training_state(again, tmp_path / "state")
    for one in (engine, again):
        one.update(batch, CLIPPED, temperature=TEMPERATURE)
    for one, other in zip(engine.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    name = "adafactor" if config.name != "adafactor" else "muon"
    stranger = make_engine(mesh, optimizer=OptimizerConfig(name=name))
    with pytest.raises(ConfigError, match=f"name={config.name}, and this one has {name}"):
        load_training_state(stranger, tmp_path / "state")
    assert stranger.device == CPU


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_layers_that_are_sharded_one_by_one_step_as_in_one_piece(mesh, monkeypatch, optimizer):
    """Also where moments come to the device part by part, as with `actor.offload_optimizer`."""
    found = []
    for is_small in (True, False):
        monkeypatch.setattr(fsdp, "is_small_model", lambda _, small=is_small: small)
        engine = make_engine(mesh)
        engine._hosts_moments = not is_small
        engine.start_optimizer(BYTES[optimizer], updates=4)
        for _ in range(2):
            engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE)
        found.append((engine.hidden_matrices, parameters(engine)))
    (hidden, weights), (again, others) = found
    assert hidden == again and len(hidden) == 14
    assert torch.equal(weights, others)


def test_adapters_are_stepped_by_muon(mesh):
    inner = make_model()
    with torch.random.fork_rng(devices=[]):
        add_adapters(inner, LoraAdapterConfig(rank=4))
    engine = TrainEngine(CausalPolicy(inner), mesh, "float32", ActorConfig())
    engine.start_optimizer(OptimizerConfig(name="muon", learning_rate=1e-2), updates=4)
    before = engine.local_parameters()
    before = {name: part.clone() for name, part in before.items()}
    engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE)
    kept = {kind for state in engine.optimizer.state.values() for kind in state}
    assert kept == {"momentum_buffer"}
    moved = {n for n, part in engine.local_parameters().items() if not torch.equal(part, before[n])}
    assert moved and all(".lora_B." in name for name in moved)  # A moves once B is not 0


def test_given_the_same_gradients_muon_steps_as_that_of_torch(mesh):
    """Bit for bit: over whole jobs rounding of gradients alone makes 1% of a step."""
    engine = make_engine(mesh, optimizer=OptimizerConfig(name="muon", weight_decay=0.1))
    inner = dict(engine.model.inner.named_parameters())
    own = {n: inner[n].to_local().detach().clone() for n in sorted(engine.hidden_matrices)}
    whole = {name: torch.nn.Parameter(tensor) for name, tensor in own.items()}
    way = {"lr": 1e-6, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    reference = torch.optim.Muon(whole.values(), **way)

    def follow(*_):
        for name, tensor in whole.items():
            tensor.grad = inner[name].grad.to_local().clone()
        reference.step()

    engine.optimizer.register_step_pre_hook(follow)
    for _ in range(3):
        engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE)
    for name, tensor in whole.items():
        assert torch.equal(tensor, inner[name].to_local()), name
